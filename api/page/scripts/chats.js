// Chats: the list, opening one, forking, rewinding, suspending, deleting.

async function refreshList() {
  try {
    listed = (await call("GET", "v1/sessions")).data;
  } catch {
    return;  // The state of the connection is shown already.
  }
  const current = listed.find((info) => info.id === chat.id);
  if (current && chat.info) chat.info = { ...chat.info, ...current };
  showList();
  showHeading();
}

// Read a session's log; return whether that worked.
async function refresh(one) {
  const first = one.info === null;
  try {
    const info = await call("GET", sessionPath(one.id));
    one.turns = info.turns.map((turn) => ({ ...turn, ...measured(turn.id) }));
    one.info = info;
    one.gone = false;
    one.busy = info.status === "busy" && (!one.running || Boolean(one.running.cut));
    if (one.busy && !one.running) adopt(one);
    if (one.busy) setTimeout(() => follow(one), 700);
  } catch (failure) {
    if (failure.status === 404) vanished(one);
    else if (failure.status !== 401) complain(one, failure.message, [["Try again", () => openChat(one.id)]]);
    if (one === chat) showChat();
    return false;
  }
  if (one === chat) showChat();
  if (one === chat && first) toBottom();
  return true;
}

// Continue to show a running turn that this tab began before it was reloaded.
function adopt(one) {
  const record = inTab.get("running:" + one.id);
  if (!record || !online()) return;
  one.busy = false;
  one.running = { ...JSON.parse(record), answer: "", thought: "", first: null, sent: null, seen: null };
  pickUp(one);
}

// Poll a turn that runs, but is not streamed by this page, until it is over.
async function follow(one) {
  if (!one.busy || !online()) return;
  if (one.running?.cut) await recover(one);
  else if (!one.running) await refresh(one);
  if (!one.busy) refreshList();
}

function vanished(one) {
  const text = one.running?.text;
  one.running = null;
  one.gone = true;
  one.busy = false;
  const kept = one.turns.length ? " What was said is still shown here." : "";
  complain(one, `This chat is gone: it was deleted, forgotten after a long rest, or the server was restarted.${kept}`, [["Start a new chat", startNew]]);
  if (text) giveBack(one, text);
}

async function openChat(id) {
  keepDraft();
  chat = chats.get(id) ?? newChat(id);
  chats.set(id, chat);
  if (!chat.running) chat.notice = null;
  if (addressed() !== id) history.pushState(null, "", "#" + encodeURIComponent(id));
  closeDrawers();
  showChat();
  if (online() && !chat.running) await refresh(chat);
  toBottom();
}

function startNew() {
  const text = chat.gone ? $("text").value : "";
  keepDraft();
  chat = newChat(null);
  if (location.hash) history.pushState(null, "", location.pathname + location.search);
  if (text) inTab.set("draft:", text);
  closeDrawers();
  showChat();
  $("text").focus();
}

// Return the chat's id from the address; null if it cannot be decoded.
function addressed() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return null;
  }
}

function fromAddress() {
  const id = addressed();
  if (id) openChat(id);
  else if (chat.id) startNew();
}

async function fork(turn) {
  await attempt(async () => {
    const info = await call("POST", sessionPath(chat.id, "/fork"), { turn });
    await openChat(info.id);
    toast(`Forked at turn ${turn}. The other chat stays as it is.`);
    $("text").focus();
    refreshList();
  });
}

function rewind(turn, text) {
  const later = chat.turns.filter((one) => one.turn > turn).length;
  const question = turn ? `Rewind to turn ${turn}?` : "Rewind to the beginning?";
  ask(question, `${count(later, "later turn")} will be forgotten. A fork keeps ${later === 1 ? "it" : "them"}.`, [
    ["Cancel"],
    ["Fork instead", async () => { await fork(turn); if (text) type(text); }],
    ["Rewind", async () => {
      await attempt(async () => {
        await call("POST", sessionPath(chat.id, "/rewind"), { turn, after: chat.turns.at(-1)?.turn ?? 0 });
        chat.notice = null;
        await refresh(chat);
        if (text) type(text);
        toast(turn ? `Back at turn ${turn}.` : "Back at the beginning.");
        $("text").focus();
        refreshList();
      });
    }, "strong"],
  ]);
}

async function suspend() {
  await attempt(async () => {
    const { state } = await call("POST", sessionPath(chat.id, "/suspend"));
    toast(`Suspended: its state is ${TIERS[state?.tier] ?? "out of the slots"}.`);
    refreshList();
  });
}

function remove() {
  ask("Delete this chat?", "It cannot be brought back. Its forks stay.", [
    ["Cancel"],
    ["Delete", async () => {
      const { id } = chat;
      await attempt(async () => {
        await call("DELETE", sessionPath(id)).catch((failure) => { if (failure.status !== 404) throw failure; });
        inTab.set("draft:" + id, null);
        startNew();
        chats.delete(id);
        toast("Deleted.");
        refreshList();
      });
    }, "danger"],
  ]);
}

// Run a button's action, and show a refusal in the chat.
async function attempt(action) {
  const one = chat;
  try {
    await action();
  } catch (failure) {
    if (!(failure instanceof Failure)) throw failure;
    if (failure.code === "session_not_found") vanished(one);
    else if (failure.status === 409) complain(one, `${explain(failure)} Nothing was changed.`, [["Look again", () => openChat(one.id)]]);
    else if (failure.status !== 401) complain(one, failure.message);
    showChat();
    toBottom();
  }
}

function explain(failure) {
  if (failure.code === "session_busy") return "A turn is running in this chat.";
  if (failure.code === "session_moved_on") return "This chat has gone on elsewhere.";
  return failure.message;
}
