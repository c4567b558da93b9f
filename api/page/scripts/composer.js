// The message box, its draft, and the scroll position of the chat.

function showComposer() {
  const running = Boolean(chat.running);
  const held = document.activeElement === $("stop") || document.activeElement === $("send");
  $("stop").hidden = !running;
  $("send").hidden = running;
  if (held) (running ? $("stop") : $("text")).focus();
  $("send").disabled = !$("text").value.trim() || chat.gone || link.state !== "open";
}

function type(text) {
  $("text").value = text;
  fit();
  showComposer();
}

// Let the box grow in browsers without `field-sizing`.
function fit() {
  if (CSS.supports("field-sizing", "content")) return;
  $("text").style.height = "auto";
  $("text").style.height = $("text").scrollHeight + "px";
}

function keepDraft() {
  inTab.set("draft:" + ($("text").dataset.chat ?? ""), $("text").value);
}

function loadDraft() {
  $("text").dataset.chat = chat.id ?? "";
  type(inTab.get("draft:" + (chat.id ?? "")) ?? "");
}

const nearBottom = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 90;
const toBottom = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };
