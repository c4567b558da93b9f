// The theme: light, dark, or the system's.

const THEMES = { auto: "as the system has it", light: "light", dark: "dark" };

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").replaceChildren(icon(theme));
  $("theme").title = `Colours: ${THEMES[theme]}`;
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}. Change`);
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const theme = names[(names.indexOf(onDevice.get("theme") ?? "auto") + 1) % names.length];
  onDevice.set("theme", theme);
  showTheme(theme);
}
