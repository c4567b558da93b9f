// The websocket, which all chats share, with a lane for each.

const SLOWEST_RETRY_MS = 8000;

const link = { socket: null, state: "connecting", attempts: 0, timer: null, due: 0 };
const online = () => link.socket !== null && link.socket.readyState === WebSocket.OPEN;

async function connect() {
  clearTimeout(link.timer);
  if (link.state === "checking" || (link.socket && link.socket.readyState < WebSocket.CLOSING)) return;
  link.state = "checking";
  showLink("connecting", "Connecting …");
  try {
    const [model] = (await call("GET", "v1/models")).data;
    maxLength = model.max_model_len;
    $("model").textContent = model.id;
  } catch (failure) {
    if (failure.status === 503) tryAgain("loading", failure.code === "loading" ? "The model is loading …" : "The server is restarting …", 1000);
    else if (failure.status !== 401) tryAgain("waiting", failure.status ? failure.message : "Not connected");
    return;
  }
  open();
}

function open() {
  const url = new URL("v1/responses", document.baseURI);
  url.protocol = url.protocol.replace("http", "ws");
  url.hash = "";
  const socket = link.socket = new WebSocket(url, key ? ["responses", "openai-insecure-api-key." + token(key)] : ["responses"]);
  link.state = "connecting";
  socket.onopen = () => {
    link.attempts = 0;
    showLink("open", "Connected");
    resume();
    pollSlots();
  };
  socket.onmessage = (message) => receive(JSON.parse(message.data));
  socket.onclose = (event) => lost(event.code);
}

// Encode text so that a subprotocol may contain it. The server decodes it.
function token(text) {
  return encodeURIComponent(text).replace(/[()]/g, (letter) => (letter === "(" ? "%28" : "%29"));
}

function lost(code) {
  link.socket = null;
  for (const one of chats.values()) if (one.running) one.running.cut = true;
  if (chat.running) chat.running.cut = true;
  tryAgain("waiting", code === 1001 ? "The server is restarting …" : "Not connected");
}

function tryAgain(state, message, wait) {
  link.attempts += 1;
  const pause = wait ?? Math.min(SLOWEST_RETRY_MS, 400 * 2 ** link.attempts) * (0.75 + Math.random() / 2);
  link.due = Date.now() + pause;
  showLink(state, message);
  link.timer = setTimeout(connect, pause);
}

function showLink(state, message) {
  link.state = state;
  const again = state === "waiting" || state === "locked";
  $("link").dataset.state = state;
  $("link").textContent = message;
  $("link").title = again ? "Try now" : "";
  $("link").disabled = !again;
  $("link").setAttribute("aria-label", again ? `${message}. Try now` : message);
  showComposer();
}

async function resume() {
  for (const one of new Set([...chats.values(), chat])) {
    if (one.running?.cut) await pickUp(one);
    else if (one === chat && one.id) await refresh(one);
  }
  await refreshList();
}

// Resume the stream of an answer that continued while the connection was lost.
async function pickUp(one) {
  const { id, seen } = one.running;
  if (!id) return recover(one);
  one.running.cut = false;
  sendEvent({ type: "response.resume", stream_id: one.id, response_id: id, starting_after: seen });
}

// Resolve a turn whose response id is unknown: it is in the session's log by now, or the server never took it.
async function recover(one) {
  const { text, known } = one.running;
  if (!one.id || !(await refresh(one))) return;
  if (one.busy) return;
  one.running = null;
  inTab.set("running:" + one.id, null);
  if ((one.turns.at(-1)?.turn ?? 0) <= known) giveBack(one, text, "The connection was lost before the server had your message. It is back in the box.");
  if (one === chat) showChat();
}
