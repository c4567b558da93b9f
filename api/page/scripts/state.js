// What the page knows: its chats, the one that is shown, and what the server has said of itself.

let key = inTab.get("key") ?? onDevice.get("key");
let maxLength = null;
let background = true;
let listed = [];
let chat = newChat(null);
const chats = new Map();  // By session id: those that were opened or written in since the page was loaded.

function newChat(id) {
  return { id, info: null, turns: [], running: null, notice: null, gone: false, busy: false };
}
