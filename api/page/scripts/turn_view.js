// A turn as it is shown: the messages, the answer, its figures, and its buttons.

const ENDS = {
  aborted: "Stopped", disconnected: "Cut off: the connection was lost", timeout: "Cut off: it took too long",
  failed: "Failed on the server", length: "Cut at the length limit",
};

function originOf({ session, turn }) {
  const button = make("button", { class: "small", onclick: () => openChat(session) }, icon("fork"), turn ? `Forked at turn ${turn} of another chat` : "Forked from another chat");
  return make("div", { class: "origin" }, button);
}

function turnOf(turn) {
  const still = Boolean(chat.running || chat.busy || chat.gone);
  const last = turn === chat.turns.at(-1);
  const messages = turn.messages ?? [];
  const question = messages.filter((message) => message.role === "user").map((message) => textOf(message.content)).join("\n");
  const before = chat.turns[chat.turns.indexOf(turn) - 1]?.turn ?? 0;
  const acts = make("div", { class: "acts" },
    make("button", { class: "small", "data-id": `fork ${turn.turn}`, disabled: chat.gone, onclick: () => fork(turn.turn), title: "Continue from here in a new chat" }, icon("fork"), "Fork", make("span", { class: "unseen" }, ` at turn ${turn.turn}`)),
    !last && make("button", { class: "small", "data-id": `rewind ${turn.turn}`, disabled: still, onclick: () => rewind(turn.turn), title: "Forget what came after" }, icon("rewind"), "Rewind", make("span", { class: "unseen" }, ` to turn ${turn.turn}`)),
    navigator.clipboard && turn.text && make("button", { class: "small", "data-id": `copy ${turn.turn}`, onclick: () => navigator.clipboard.writeText(turn.text).then(() => toast("Copied.")) }, icon("copy"), "Copy", make("span", { class: "unseen" }, ` the answer of turn ${turn.turn}`)));
  return make("article", { class: "turn", "data-turn": turn.turn, "aria-label": `Turn ${turn.turn}` },
    ...messages.map((message) => saidOf(message, question && message === messages.at(-1) && { turn: turn.turn, question, before, still })),
    make("div", { class: "answer" }, make("h3", { class: "unseen" }, "Answer"), thoughtOf(turn.reasoning_content), make("div", { class: "words" }, turn.text ?? ""), figuresOf(turn), acts));
}

function saidOf({ role, content }, edit) {
  return make("div", { class: `said ${role}` }, make("h3", { class: "unseen" }, role === "user" ? "You" : role), make("div", { class: "words" }, textOf(content)),
    edit && make("div", { class: "acts" }, make("button", { class: "small", "data-id": `edit ${edit.turn}`, disabled: edit.still, title: "Ask differently from here on", onclick: () => rewind(edit.before, edit.question) }, icon("edit"), "Edit", make("span", { class: "unseen" }, ` turn ${edit.turn}`))));
}

function figuresOf(turn) {
  const prompt = turn.prompt_tokens ?? turn.start + turn.input_tokens;
  const ended = turn.status !== "completed" ? turn.status : turn.finish_reason === "length" ? "length" : "";
  const share = prompt ? Math.round((turn.cached_tokens / prompt) * 100) : 0;
  const bar = make("i");
  bar.style.width = share + "%";
  return make("div", { class: "figures" },
    ended && make("span", { class: "ended" }, ENDS[ended] ?? ended),
    make("span", { title: `${number(prompt)} tokens of history and message: ${number(turn.cached_tokens)} came with the state, the others were read` },
      make("span", { class: "bar", "aria-hidden": "true" }, bar), make("b", {}, number(turn.cached_tokens)), " from the state, ", make("b", {}, number(prompt - turn.cached_tokens)), " read"),
    make("span", {}, make("b", {}, number(turn.output_tokens)), turn.output_tokens === 1 ? " token" : " tokens"),
    turn.accepted > 0 && make("span", { title: "Tokens that came as drafts: each saved a step" }, make("b", {}, number(turn.accepted)), " drafted"),
    turn.rate && make("span", {}, make("b", {}, number(Math.round(turn.rate))), " tokens/s"),
    typeof turn.first_ms === "number" && make("span", { title: "From sending to the first token shown" }, "first token ", make("b", {}, duration(turn.first_ms))));
}

function thoughtOf(thought, open = false) {
  return thought && make("details", { class: "thought", open }, make("summary", {}, "Reasoning"), make("div", {}, thought));
}

function runningOf(running) {
  live = { answer: document.createTextNode(running.answer), thought: running.thought && document.createTextNode(running.thought) };
  return make("article", { class: "turn", "aria-label": "Running turn", "aria-busy": "true" },
    saidOf({ role: "user", content: running.text }),
    make("div", { class: "answer writing" }, make("h3", { class: "unseen" }, "Answer"), thoughtOf(live.thought, true), make("div", { class: "words" }, live.answer)));
}

function noticeOf() {
  const notice = chat.notice ?? (chat.busy ? { message: "A turn of this chat is running elsewhere. Its answer appears here when it is done.", actions: [], mild: true } : null);
  if (!notice) return null;
  const { message, actions, mild } = notice;
  return make("div", { class: mild ? "notice mild" : "notice", role: "alert" }, icon("alert"), make("p", {}, message),
    ...actions.map(([label, action]) => make("button", { class: "plain", "data-id": `do ${label}`, onclick: action }, label)));
}
