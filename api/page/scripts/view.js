// The chat that is shown, its heading, and the list of the others.

const TIERS = { slot: "in a slot", host: "in host memory", disk: "on disk", tokens: "kept as tokens" };

// The text nodes of the running answer and of its reasoning.
let live = {};

function showChat() {
  showHeading();
  showList();
  const empty = !chat.turns.length && !chat.running;
  $("welcome").hidden = !empty || Boolean(chat.id && chat.notice);
  $("log").hidden = empty && !chat.notice;
  refill($("log"), [chat.info?.parent && originOf(chat.info.parent), ...chat.turns.map(turnOf), chat.running && runningOf(chat.running), noticeOf()]);
  showComposer();
  if ($("text").dataset.chat !== (chat.id ?? "")) loadDraft();
}

function titleOf(info, turns = []) {
  const [first] = turns;
  const message = first?.messages?.find((one) => one.role === "user");
  return (message && textOf(message.content)) || info?.title || "";
}

function showHeading() {
  const title = titleOf(chat.info, chat.turns) || chat.running?.text || (chat.id ? "Chat" : "New chat");
  $("title").textContent = title;
  document.title = `${title.slice(0, 60)} · Baton`;
  const { info } = chat;
  const parts = [];
  if (info?.turn) {
    parts.push(count(chat.turns.length, "turn"), maxLength ? `${number(info.position)} of ${number(maxLength)} tokens` : count(info.position, "token"));
    if (info.state) parts.push(`state ${TIERS[info.state.tier] ?? info.state.tier}`);
    if (info.saved === false) parts.push("not saved on the disk");
  }
  $("subtitle").textContent = parts.join(" · ");
  const none = !chat.id || chat.gone;
  $("suspend").hidden = none || !chat.turns.length;
  $("suspend").disabled = Boolean(chat.running || chat.busy);
  $("delete").hidden = none;
}

function showList() {
  const rows = listed.filter((info) => info.turn || info.status === "busy" || info.id === chat.id || chats.get(info.id)?.running);
  $("nochats").hidden = rows.length > 0;
  refill($("chats"), rows.map(rowOf));
}

// Replace the children of `place`; the element that had the focus gets it again.
function refill(place, nodes) {
  const held = place.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  place.replaceChildren(...nodes.filter(Boolean));
  if (held) place.querySelector(`[data-id="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

function rowOf(info) {
  const known = chats.get(info.id);
  const title = titleOf(info, known?.turns) || known?.running?.text || `Chat ${info.id.replace(/^session-/, "").slice(0, 8)}`;
  const running = known?.running || info.status === "busy";
  const where = info.state && info.state.tier !== "slot" ? TIERS[info.state.tier] : "";
  const details = running ? "answering …" : [count(info.position, "token"), where, ago(Date.now() / 1000 - (info.last_turn_at ?? info.created_at))].filter(Boolean).join(" · ");
  const row = make("button", { class: "chat", "data-id": info.id, "aria-current": info.id === chat.id ? "page" : null, onclick: () => openChat(info.id) },
    make("b", {}, title),
    make("small", {}, running && make("i", { class: "live" }), info.parent && icon("fork"), details));
  return make("li", {}, row);
}
