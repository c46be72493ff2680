// Finds any topic, channel, node or page. The names are fetched when it opens and searched here, so typing never waits.
import { byId, make } from "./dom.js";
import { base, request } from "./http.js";

const SHOWN_MAX = 50;
const FRESH_MS = 10_000;

const dialog = byId("palette");
const input = dialog?.querySelector("input");
const list = dialog?.querySelector("ul");
let entries = [];
let fetchedAt = -Infinity;
let shown = [];
let selected = 0;

// Rates how well an entry matches: lower is better, and null is no match. Every word must occur; an early place in the
// name counts most.
function score(entry, words) {
  let total = 0;
  for (const word of words) {
    const at = entry.text.indexOf(word);
    if (at < 0) return null;
    const isWordStart = at === 0 || /[^a-z0-9]/.test(entry.text[at - 1]);
    total += (at === 0 ? 0 : isWordStart ? 10 : 40) + Math.min(at, 20);
  }
  return total + entry.text.length / 20 + { page: 0, topic: 1, node: 2, channel: 3 }[entry.kind];
}

export function search(all, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const entry of all) {
    const value = score(entry, words);
    if (value !== null) found.push([value, entry]);
  }
  return found.sort((one, other) => one[0] - other[0]).slice(0, SHOWN_MAX).map(([, entry]) => entry);
}

function marked(name, query) {
  const word = query.toLowerCase().split(/\s+/).filter(Boolean)[0];
  const at = word ? name.toLowerCase().indexOf(word) : -1;
  if (at < 0) return [name];
  return [name.slice(0, at), make("mark", {}, name.slice(at, at + word.length)), name.slice(at + word.length)];
}

function draw() {
  shown = search(entries, input.value);
  selected = 0;
  list.replaceChildren(...shown.map((entry, index) => make("li", { id: `found-${index}`, role: "option", "data-path": entry.path },
    make("span", { class: "kind" }, entry.kind),
    make("span", { class: "what" }, ...marked(entry.name, input.value)),
    entry.hint ? make("span", { class: "where" }, entry.hint) : null)));
  if (!shown.length) list.append(make("li", { class: "nothing", role: "option", "aria-disabled": "true" }, "Nothing has this name"));
  select(0);
}

function select(index) {
  if (!shown.length) return;
  selected = (index + shown.length) % shown.length;
  [...list.children].forEach((row, at) => row.setAttribute("aria-selected", String(at === selected)));
  list.children[selected].scrollIntoView({ block: "nearest" });
  input.setAttribute("aria-activedescendant", `found-${selected}`);
}

const go = (path) => location.assign(base + path);

async function load() {
  if (performance.now() - fetchedAt < FRESH_MS) return;
  const answer = await request("/search.json");
  if (!answer.ok) return;
  entries = answer.entries.map((entry) => ({ ...entry, text: entry.name.toLowerCase() }));
  fetchedAt = performance.now();
  draw();
}

export function openPalette() {
  if (!dialog || dialog.open) return;
  input.value = "";
  draw();
  dialog.showModal();
  input.focus();
  load();
}

if (dialog) {
  input.addEventListener("input", draw);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") select(selected + 1);
    else if (event.key === "ArrowUp") select(selected - 1);
    else if (event.key === "Enter" && shown[selected]) go(shown[selected].path);
    else return;
    event.preventDefault();
  });
  list.addEventListener("click", (event) => {
    const row = event.target.closest("[data-path]");
    if (row) go(row.dataset.path);
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  document.querySelectorAll("[data-open-palette]").forEach((button) => button.addEventListener("click", openPalette));
}
