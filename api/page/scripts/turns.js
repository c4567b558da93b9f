// Turns: sending a message, streaming its answer, and giving back a message that the server did not take.

async function send(text) {
  if (!text.trim() || chat.running || chat.gone) return;
  if (!online()) {
    connect();
    toast("Not connected: your message stays in the box.");
    return;
  }
  const one = chat;
  one.notice = null;
  one.running = { text, answer: "", thought: "", known: one.turns.at(-1)?.turn ?? 0, sent: performance.now(), first: null, id: null, seen: null };
  $("spoken").replaceChildren();
  type("");
  keepDraft();
  showChat();
  toBottom();
  if (!one.id && !(await createSession(one))) return;
  one.running.sent = performance.now();
  create(one);
}

// An answer in the background outlives the connection and a reload. A server that stores no responses does not offer that.
function create(one) {
  const { text, known } = one.running;
  sendEvent({ type: "response.create", stream_id: one.id, conversation: one.id, after: known, input: text, ...(background ? { background } : { store: false }) });
}

function sendEvent(event) {
  if (online()) link.socket.send(JSON.stringify(event));
}

async function createSession(one) {
  try {
    const info = await call("POST", "v1/sessions", {});
    one.id = info.id;
    one.info = info;
  } catch (failure) {
    const { text } = one.running;
    one.running = null;
    giveBack(one, text, failure.status === 401 ? "The server asks for an API key. Your message is back in the box." : failure.message);
    return false;
  }
  chats.set(one.id, one);
  if (one !== chat) return true;
  history.replaceState(null, "", "#" + one.id);
  inTab.set("draft:", null);
  $("text").dataset.chat = one.id;
  keepDraft();
  return true;
}

function stop() {
  if (!chat.running || chat.running.stopping) return;
  chat.running.stopping = true;
  cancel(chat);
}

function cancel(one) {
  sendEvent({ type: "response.cancel", stream_id: one.id, response_id: one.running.id });
}

function receive(event) {
  const one = chats.get(event.stream_id);
  if (!one?.running) return;
  if (event.sequence_number !== undefined) one.running.seen = event.sequence_number;
  switch (event.type) {
    case "response.created":
      return begun(one, event.response);
    case "response.output_text.delta":
      return grow(one, "answer", event.delta);
    case "response.reasoning_text.delta":
      return grow(one, "thought", event.delta);
    case "response.completed":
    case "response.incomplete":
    case "response.failed":
      return finish(one, event.response);
    case "error":
      return refused(one, event);
  }
}

function begun(one, response) {
  const { running } = one;
  running.id = response.id;
  inTab.set("running:" + one.id, JSON.stringify({ id: running.id, text: running.text, known: running.known }));
  if (running.stopping) cancel(one);
  if (one === chat) pollSlots();
}

function grow(one, part, delta) {
  const { running } = one;
  if (running.first === null) running.first = performance.now();
  running[part] += delta;
  if (one !== chat) return;
  const near = nearBottom();
  if (live[part]) live[part].data = running[part];
  else showChat();
  speak(running);
  if (near) toBottom();
}

// Screen readers hear whole sentences, each once.
function speak(running, all = false) {
  const rest = running.answer.slice(running.spoken ?? 0);
  const end = all ? rest.length : Math.max(rest.lastIndexOf(". "), rest.lastIndexOf("! "), rest.lastIndexOf("? "), rest.lastIndexOf("\n")) + 1;
  if (!end) return;
  $("spoken").append(make("p", {}, rest.slice(0, end)));
  running.spoken = (running.spoken ?? 0) + end;
}

async function finish(one, response) {
  const { running } = one;
  const ended = performance.now();
  const usage = response.usage ?? {};
  const output = usage.output_tokens ?? 0;
  inTab.set("running:" + one.id, null);
  measure(response.id, {
    first_ms: running.first === null || running.sent === null ? null : running.first - running.sent,
    accepted: usage.output_tokens_details?.accepted_prediction_tokens ?? 0,
    rate: running.first !== null && output > 1 && ended > running.first ? ((output - 1) * 1000) / (ended - running.first) : null,
  });
  const cached = usage.input_tokens_details?.cached_tokens ?? 0;
  one.running = null;
  if (response.status !== "failed") one.turns.push({
    turn: response.turn ?? running.known + 1, id: response.id, status: STATUS[response.status] ?? response.status,
    finish_reason: response.incomplete_details ? "length" : null, messages: [{ role: "user", content: running.text }], text: running.answer, reasoning_content: running.thought,
    output_tokens: output, cached_tokens: cached, prompt_tokens: usage.input_tokens, ...measured(response.id),
  });
  if (one === chat) {
    speak(running, true);
    const near = nearBottom();
    showChat();
    if (near) toBottom();
    pollSlots();
  }
  const read = await refresh(one);
  if (response.error) failed(one, running, response.error);
  if (read) refreshList();
}

// The server may have failed before the turn began, during it, or while saving it.
function failed(one, running, error) {
  const taken = (one.turns.at(-1)?.turn ?? 0) > running.known;
  if (taken) complain(one, error.message);
  else giveBack(one, running.text, `${error.message} Your message is back in the box.`);
  if (one === chat) showChat();
}

const STATUS = { completed: "completed", incomplete: "completed", cancelled: "aborted", failed: "failed" };

function refused(one, { status, error }) {
  const { text } = one.running;
  if (error.code === "response_not_found") {
    if (status === 404) recover(Object.assign(one, { running: { ...one.running, id: null, cut: true } }));
    return;  // With status 400: the response to stop has not begun yet.
  }
  if (error.param === "background" && background) {
    background = false;
    return create(one);
  }
  if (error.code === "session_not_found") return vanished(one);
  one.running = null;
  if (error.code === "session_busy" || error.code === "session_moved_on") {
    giveBack(one, text, `${explain(error)} Your message is back in the box.`);
    refresh(one);
  } else {
    giveBack(one, text, `${error.message} Your message is back in the box.`);
  }
}

function complain(one, message, actions = [], mild = false) {
  one.notice = { message, actions, mild };
}

// Put a message that was not taken back into the box, before anything typed since.
function giveBack(one, text, message, actions) {
  if (message) complain(one, message, actions);
  const name = "draft:" + (one.id ?? "");
  const typed = one === chat ? $("text").value : inTab.get(name) ?? "";
  const whole = typed.trim() ? `${text}\n${typed}` : text;
  inTab.set(name, whole);
  if (one !== chat) return;
  type(whole);
  showChat();
  toBottom();
}

// Store the figures of a turn that only this page can measure, so that they survive a reload.
function measure(id, figures) {
  const all = JSON.parse(inTab.get("figures") ?? "{}");
  const recent = Object.entries(all).slice(-500);
  inTab.set("figures", JSON.stringify({ ...Object.fromEntries(recent), [id]: figures }));
}

function measured(id) {
  return JSON.parse(inTab.get("figures") ?? "{}")[id] ?? {};
}
