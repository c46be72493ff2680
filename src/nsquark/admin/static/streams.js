// Filters the list of topics while the user types, by asking the server for the rows that match.
import { reconnect } from "./events.js";
import { morph, parse } from "./morph.js";

const TYPING_MS = 120;
const input = document.getElementById("filter");
let timer = 0;
let asked = null;

async function show(url) {
  asked?.abort();
  asked = new AbortController();
  try {
    const response = await fetch(url, { signal: asked.signal, credentials: "same-origin" });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    history.replaceState(null, "", url);
    const list = document.getElementById("topics");
    morph(list, parse(page.getElementById("topics").outerHTML).firstElementChild);
    reconnect();
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

function wanted() {
  const url = new URL(location.href);
  url.searchParams.delete("page");
  if (input.value.trim()) url.searchParams.set("q", input.value.trim());
  else url.searchParams.delete("q");
  return url;
}

input.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(() => show(wanted()), TYPING_MS);
});
input.form.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  show(wanted());
});
