// The page's state: its chats, the one that is shown, and facts about the server.

let key = inTab.get("key") ?? onDevice.get("key");
let maxLength = null;
let background = true;
let listed = [];
let chat = newChat(null);
const chats = new Map();  // Chats that were opened or written in since the page was loaded, by session id.

function newChat(id) {
  return { id, info: null, turns: [], running: null, notice: null, gone: false, busy: false };
}
