// Runs the message browser: pages of a topic's log from the newest back, a filter and a live tail. It consumes nothing.
import { localInput, position, showFields } from "./choices.js";
import { byId } from "./dom.js";
import { exact, seconds, size } from "./format.js";
import { base, request } from "./http.js";
import { messageRow } from "./message.js";
import { clockTime } from "./times.js";

const PAGE_SIZE = 50;
const SHOWN_MAX = 1000;
const TAIL_WAIT_S = 20;
const TAIL_PAUSE_MS = 500;
const ENDED = {
  start: "up to the oldest message kept",
  limit: "this page is full",
  time: "stopped when its time was up",
  bytes: "stopped when it had read its share",
};

const card = byId("browser");
const form = card?.querySelector("form");
const list = byId("messages");
const path = card ? `/messages/${encodeURIComponent(card.dataset.topic)}/found` : "";
let older = null;
let newer = null;
let running = 0;
let isTailing = false;

function query(extra = {}) {
  const values = Object.fromEntries(new FormData(form));
  const at = position(values.at, values, "seq:");
  const wanted = { at: at ?? "newest", filter: values.filter.trim(), node: values.node ?? "", limit: PAGE_SIZE, ...extra };
  return new URLSearchParams(Object.entries(wanted).filter(([, value]) => value !== ""));
}

const counted = (count) => `${exact(count)} ${count === 1 ? "message" : "messages"}`;

function describe({ searched, failures, without_log: without }) {
  const parts = [`Searched ${counted(searched.messages)}, ${size(searched.bytes)}, in ${seconds(searched.seconds)}`];
  if (searched.oldest_ns) parts[0] += `, back to ${clockTime(searched.oldest_ns / 1e9)}`;
  if (ENDED[searched.ended]) parts.push(ENDED[searched.ended]);
  if (searched.damaged) parts.push(`${exact(searched.damaged)} damaged`);
  if (without.length) parts.push(`without a log: ${without.join(", ")}`);
  for (const failure of failures) parts.push(`${failure.node}: ${failure.text}`);
  byId("searched").textContent = `${parts.join(" · ")}.`;
}

function fail(answer) {
  const trouble = byId("filter-error");
  trouble.textContent = answer.reason || answer.message || "The log could not be read.";
  trouble.hidden = false;
  byId("searched").textContent = "";
  byId("older").hidden = true;
}

const rowsOf = (messages) => messages.map((message) => messageRow(card.dataset.topic, message, card.dataset.mayRepublish === "yes"));

async function load(isOlder) {
  const turn = ++running;
  byId("searched").textContent = "Reading …";
  const answer = await request(`${path}.json?${query(isOlder ? { older } : {})}`);
  if (turn !== running) return;
  if (!isOlder) list.replaceChildren();
  if (!answer.ok) {
    fail(answer);
    return;
  }
  byId("filter-error").hidden = true;
  list.append(...rowsOf(answer.messages));
  older = answer.older;
  if (!isOlder) newer = answer.newer;
  byId("older").hidden = !older || list.childElementCount >= SHOWN_MAX;
  describe(answer);
  if (!list.childElementCount && !older) byId("searched").textContent += " Nothing fits; the log may be empty, or publish a message below.";
}

const notShown = (count) => (count ? ` · ${counted(count)} not shown` : "");

function describeTail(skipped) {
  byId("searched").textContent = `Live · ${exact(list.childElementCount)} shown${notShown(skipped)}`;
  byId("older").hidden = true;
}

// Asks again and again for messages newer than the last answer; each request waits until some come.
async function tail() {
  const turn = running;
  let skipped = 0;
  describeTail(skipped);
  while (isTailing && turn === running) {
    const answer = await request(`${path}.json?${query({ newer, wait: TAIL_WAIT_S })}`);
    if (!isTailing || turn !== running) return;
    if (!answer.ok) {
      fail(answer);
      setTailing(false);
      return;
    }
    newer = answer.newer ?? newer;
    const rows = rowsOf(answer.messages);
    rows.forEach((row) => row.firstElementChild.classList.add("fresh"));
    list.prepend(...rows);
    while (list.childElementCount > SHOWN_MAX) list.lastElementChild.remove();
    skipped += answer.skipped;
    describeTail(skipped);
    await new Promise((resolve) => setTimeout(resolve, TAIL_PAUSE_MS));
  }
}

async function setTailing(isOn) {
  isTailing = isOn;
  byId("tail").setAttribute("aria-pressed", String(isOn));
  byId("tail").classList.toggle("primary", isOn);
  byId("tail").textContent = isOn ? "Stop" : "Live tail";
  if (!isOn) return;
  form.at.value = "newest";
  showFields(form, "newest");
  await load(false);
  if (newer) tail();
}

function rememberInAddress() {
  const values = Object.fromEntries([...new FormData(form)].filter(([name, value]) => value && !(name === "at" && value === "newest")));
  if (values.at !== "time") delete values.time;
  if (values.at !== "seq") delete values.seq;
  const text = new URLSearchParams(values).toString();
  history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
  byId("download").href = `${base}${path}.jsonl?${query({ limit: "" })}`;
}

function restoreFromAddress() {
  form.time.value = localInput(new Date());
  for (const [name, value] of new URLSearchParams(location.search)) {
    if (form.elements[name]) form.elements[name].value = value;
  }
  showFields(form, form.at.value);
}

if (card) {
  restoreFromAddress();
  rememberInAddress();
  form.at.addEventListener("change", () => showFields(form, form.at.value));
  form.addEventListener("input", rememberInAddress);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setTailing(false);
    rememberInAddress();
    load(false);
  });
  byId("older").addEventListener("click", () => load(true));
  byId("tail").addEventListener("click", () => setTailing(!isTailing));
  document.addEventListener("published", () => { if (!isTailing) load(false); });
  load(false);
}
