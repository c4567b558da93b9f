// The drawers at the sides: the list of chats, and the map of the slots.

function showMap(shown) {
  $("map").hidden = !shown;
  document.body.classList.toggle("map", shown);
  $("openmap").setAttribute("aria-expanded", shown);
  if (wide.matches) onDevice.set("map", shown ? "shown" : "hidden");
  veil();
  if (shown) pollSlots();
  if (shown && !wide.matches) $("closemap").focus();
}

function showSide(shown) {
  document.body.classList.toggle("side", shown);
  $("openside").setAttribute("aria-expanded", shown);
  veil();
  if (shown) $("closeside").focus();
}

const sideOpen = () => phone.matches && document.body.classList.contains("side");
const mapOver = () => !wide.matches && !$("map").hidden;

// Make the part of the page that an open drawer covers inert, so that it cannot get the focus.
function veil() {
  const covered = sideOpen() || mapOver();
  $("veil").hidden = !covered;
  document.querySelector("main").inert = covered;
  $("side").inert = phone.matches ? !sideOpen() : covered;
}

function closeDrawers() {
  const opener = sideOpen() ? $("openside") : mapOver() ? $("openmap") : null;
  if (sideOpen()) showSide(false);
  if (mapOver()) showMap(false);
  opener?.focus();
}

function fitDrawers() {
  document.body.classList.remove("side");
  showMap(wide.matches && onDevice.get("map") !== "hidden");
}
