// Handles the keys: `/` searches, `g` and a letter opens a page, j and k move through rows, `?` lists the keys.
import { base } from "./http.js";
import { byId } from "./dom.js";
import { openPalette } from "./palette.js";

const CHORD_MS_MAX = 1200;
const PLACES = { o: "/", t: "/topics", n: "/nodes", s: "/spark", l: "/lookup", c: "/counter" };
let chordUntil = 0;

const isTyping = (target) => target.closest("input, textarea, select, [contenteditable]") !== null;

function move(step) {
  const links = [...document.querySelectorAll("[data-rows] > * td.name a, .messages summary, .attention a")];
  if (!links.length) return;
  const at = links.indexOf(document.activeElement);
  const next = links[Math.min(links.length - 1, Math.max(0, at + step))];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) {
    if (event.key === "k" && !event.altKey) {
      event.preventDefault();
      openPalette();
    }
    return;
  }
  if (isTyping(event.target) || document.querySelector("dialog[open]")) return;
  const isChord = performance.now() < chordUntil;
  chordUntil = 0;
  if (isChord && PLACES[event.key]) location.assign(base + PLACES[event.key]);
  else if (event.key === "g") chordUntil = performance.now() + CHORD_MS_MAX;
  else if (event.key === "/") openPalette();
  else if (event.key === "?") byId("shortcuts")?.showModal();
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "f") byId("filter")?.focus();
  else return;
  event.preventDefault();
});

document.addEventListener("click", (event) => {
  if (event.target.closest("[data-open-shortcuts]")) byId("shortcuts").showModal();
  const closer = event.target.closest("[data-close]");
  if (closer) closer.closest("dialog").close();
});
