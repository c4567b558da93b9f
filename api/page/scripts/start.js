// Event handlers, and the first rendering.

const EXAMPLES = [
  ["My name is Clara.", "then ask what your name is"],
  ["What is 7 plus 5?", "sums up to 20"],
  ["My favourite colour is teal.", "it is remembered, turn by turn"],
  ["What are you?", "a model introduces itself"],
];

$("composer").onsubmit = (event) => { event.preventDefault(); send($("text").value); };
$("text").oninput = () => { keepDraft(); fit(); showComposer(); };
$("text").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send($("text").value);
};
$("stop").onclick = stop;
$("new").onclick = startNew;
$("suspend").onclick = suspend;
$("delete").onclick = remove;
$("link").onclick = () => (link.state === "locked" ? askForKey() : connect());
$("skip").onclick = (event) => { event.preventDefault(); $("text").focus(); };
$("theme").onclick = nextTheme;
$("openside").onclick = () => showSide(true);
$("closeside").onclick = $("closemap").onclick = () => (wide.matches ? (showMap(false), $("openmap").focus()) : closeDrawers());
$("openmap").onclick = () => showMap($("map").hidden);
$("veil").onclick = closeDrawers;
$("keyform").onsubmit = (event) => { event.preventDefault(); takeKey(); };
$("slots").onkeydown = moveAmongSlots;
$("slots").onmouseover = (event) => { pointed = event.target.closest(".slot"); describeSlot(); };
$("slots").onmouseleave = () => { pointed = null; describeSlot(); };
$("slots").addEventListener("focusin", () => { pointed = null; describeSlot(); });
$("slots").onclick = (event) => { pointed = event.target.closest(".slot"); describeSlot(); };
$("scroll").onscroll = () => { $("down").hidden = nearBottom(); };
$("down").onclick = () => { toBottom(); $("text").focus(); };
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (sideOpen() || mapOver()) closeDrawers();
  else stop();
});
document.addEventListener("visibilitychange", pollSlots);
window.addEventListener("online", connect);
window.addEventListener("popstate", fromAddress);
wide.addEventListener("change", fitDrawers);
phone.addEventListener("change", fitDrawers);

$("examples").append(...EXAMPLES.map(([text, why]) => make("button", { onclick: () => send(text) }, text, make("small", {}, why))));
showTheme(onDevice.get("theme") ?? "auto");
fitDrawers();
showLegend([]);
describeSlot();
fromAddress();
showChat();
connect();
if (!phone.matches) $("text").focus();
