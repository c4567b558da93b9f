// The map of the state slots.

const PLACES = {
  free: ["Free", "not in use", ""],
  owned: ["Owned", "held by the actor of this letter", "F"],
  "in transit": ["In transit", "on its way in a message", "→"],
  cached: ["Cached", "a state to resume from", ""],
  quarantined: ["Quarantined", "withdrawn after a fault", "✕"],
};
const ACTORS = { cache: "C", scheduler: "S", forward: "F", results: "R" };
const MAX_SLOTS = 1024;

let polling = null;

async function pollSlots() {
  if ($("map").hidden || document.hidden || !online()) return;
  clearTimeout(polling);
  try {
    showSlots(await call("GET", "debug/slots" + (chat.id ? `?session=${encodeURIComponent(chat.id)}` : "")));
    showPeers(await call("GET", "debug/peers"));
  } catch (failure) {
    $("usage").textContent = failure.message;
  }
  clearTimeout(polling);
  polling = setTimeout(pollSlots, 1000);
}

function showSlots(entries) {
  const shown = entries.slice(0, MAX_SLOTS);
  const used = entries.filter((entry) => entry.place !== "free").length;
  $("usage").textContent = `${number(used)} of ${number(entries.length)} hold a state${shown.length < entries.length ? `; the first ${number(MAX_SLOTS)} are shown` : ""}.`;
  layOutSlots(shown.map((entry) => entry.engine_name ?? ""));
  const cells = slotCells();
  shown.forEach((entry, index) => showSlot(cells[index], entry));
  showLegend(entries);
  describeSlot();
}

const slotCells = () => [...$("slots").querySelectorAll(".slot")];

// Make a cell for each slot. Through a router, the slots of an engine have its name above them.
function layOutSlots(engines) {
  const layout = engines.join();
  if ($("slots").dataset.layout === layout && $("slots").children.length) return;
  $("slots").dataset.layout = layout;
  const cells = engines.map((_, index) => make("button", { class: "slot", tabindex: index ? "-1" : "0" }));
  $("slots").replaceChildren(...cells.flatMap((cell, index) => engines[index] && engines[index] !== engines[index - 1] ? [make("h3", {}, engines[index]), cell] : [cell]));
}

// A slot of a running turn has its request; a slot of a cached state has the session whose history that belongs to.
const isMine = (entry) => Boolean((entry.request && entry.request === chat.running?.id) || (chat.id && entry.session === chat.id));

function showSlot(cell, entry) {
  const mark = entry.place === "owned" ? ACTORS[entry.holder] ?? "?" : PLACES[entry.place]?.[2] ?? "?";
  if (cell.textContent !== mark) cell.textContent = mark;
  cell.dataset.place = entry.place;
  cell.classList.toggle("mine", isMine(entry));
  cell.entry = entry;
  cell.setAttribute("aria-label", describeEntry(entry).join(", "));
}

function describeEntry(entry) {
  const [name] = PLACES[entry.place] ?? [entry.place];
  const holder = entry.place === "owned" ? ` by ${entry.holder}` : entry.place === "cached" ? ` as ${entry.holder}` : "";
  const lines = [`Slot ${entry.slot}${entry.engine_name ? ` of ${entry.engine_name}` : ""}: ${name.toLowerCase()}${holder}`];
  if (typeof entry.position === "number") lines.push(`the state after ${count(entry.position, "token")}`);
  if (entry.loans) lines.push(`lent ${count(entry.loans, "time")}`);
  if (typeof entry.seconds === "number") lines.push(`for ${entry.seconds < 120 ? Math.round(entry.seconds) + " s" : Math.round(entry.seconds / 60) + " min"}`);
  if (isMine(entry)) lines.push("this chat");
  return lines;
}

let pointed = null;

function describeSlot() {
  const cell = pointed ?? document.activeElement?.closest?.(".slot");
  if (!cell?.entry) {
    $("about").replaceChildren(make("span", {}, "Point at a slot to see what holds it."));
    return;
  }
  const [first, ...others] = describeEntry(cell.entry);
  $("about").replaceChildren(make("b", {}, first), make("br"), make("span", {}, others.join(" · ")));
}

function showLegend(entries) {
  const rows = Object.entries(PLACES).map(([place, [name, what, mark]]) => {
    const those = entries.filter((entry) => entry.place === place);
    const holders = place === "owned" ? Object.entries(ACTORS).map(([actor, letter]) => `${letter}\u00a0${actor}`).join(" · ") : what;
    return make("li", {}, make("i", { class: "sample", "data-place": place, "aria-hidden": "true" }, mark), make("span", {}, name, make("small", {}, holders)), make("b", {}, number(those.length)));
  });
  const own = entries.filter(isMine).length;
  rows.push(make("li", {}, make("i", { class: "sample mine", "aria-hidden": "true" }), make("span", {}, "This chat", make("small", {}, "marked with a ring: its history")), make("b", {}, number(own))));
  $("legend").replaceChildren(...rows);
}

// The states that are at another engine, or on their way between it and this one.
function showPeers(links) {
  const rows = links.map((link) => {
    const [asked, lent] = [link.imports.length, link.loans.length];
    const what = `peer (${link.role}): ${asked} asked for, ${lent} for it`;
    return make("li", {}, make("i", { class: "sample", "data-place": "peer", "aria-hidden": "true" }, "⇄"), make("span", {}, link.engine_name ? `${link.engine_name}, ${link.engine}` : link.engine, make("small", {}, what)), make("b", {}, number(asked + lent)));
  });
  $("peers").replaceChildren(...rows);
}

function moveAmongSlots(event) {
  const cells = slotCells();
  const here = cells.indexOf(document.activeElement);
  const columns = getComputedStyle($("slots")).gridTemplateColumns.split(" ").length;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -here, End: cells.length - 1 - here }[event.key];
  if (here < 0 || step === undefined) return;
  event.preventDefault();
  const next = cells[Math.min(cells.length - 1, Math.max(0, here + step))];
  cells[here].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
