// Toasts, questions, and the dialog for the API key.

let toasting;
function toast(message) {
  $("toast").textContent = message;
  clearTimeout(toasting);
  toasting = setTimeout(() => $("toast").replaceChildren(), 3500);
}

function ask(question, detail, choices) {
  $("asked").textContent = question;
  $("detail").textContent = detail;
  $("choices").replaceChildren(...choices.map(([label, action, look]) =>
    make("button", { class: `plain ${look ?? ""}`, onclick: () => { $("confirm").close(); action?.(); } }, label)));
  $("confirm").showModal();
}

function askForKey() {
  clearTimeout(link.timer);
  showLink("locked", "API key needed");
  $("why").textContent = key ? "That key was not accepted." : "Chats belong to the key that started them.";
  $("why").className = key ? "wrong" : "";
  if (!$("lock").open) $("lock").showModal();
  $("key").select();
}

function takeKey() {
  key = $("key").value.trim();
  inTab.set("key", key);
  onDevice.set("key", $("keep").checked ? key : null);
  $("lock").close();
  connect();
}
