// DOM elements, and the formats of numbers and times.

const $ = (id) => document.getElementById(id);
const wide = matchMedia("(min-width: 1100px)");
const phone = matchMedia("(max-width: 767px)");

function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child || child === 0));
  return node;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", "#i-" + name);
  svg.append(use);
  svg.setAttribute("aria-hidden", "true");
  return svg;
}

const number = (value) => value.toLocaleString("en");
const count = (value, what) => `${number(value)} ${what}${value === 1 ? "" : "s"}`;
const duration = (ms) => (ms < 995 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

function ago(seconds) {
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(Date.now() - seconds * 1000).toLocaleDateString();
}

function textOf(content) {
  if (typeof content === "string") return content;
  return Array.isArray(content) ? content.map((part) => part.text ?? "").join("") : "";
}
