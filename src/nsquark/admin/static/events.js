// Receives the one event stream of a tab: figures and rows as pieces of HTML, and series as points. A hidden tab closes
// it after a while.
import { base } from "./http.js";
import { morph, morphChildren, parse } from "./morph.js";

const HIDDEN_MS_MAX = 60_000;
const SERIES_SECONDS_MAX = 3600;
const RETRY_MS = 3000;

const series = new Map();
const listeners = new Map();
let source = null;
let hiddenTimer = 0;
let retryTimer = 0;

export const pointsOf = (key) => series.get(key) ?? { t: [], v: [] };

export function onSeries(key, callback) {
  if (!listeners.has(key)) listeners.set(key, new Set());
  listeners.get(key).add(callback);
  return () => listeners.get(key).delete(callback);
}

function addPoints(key, { t, v }) {
  const known = pointsOf(key);
  const points = { t: [...known.t, ...t], v: [...known.v, ...v] };
  const oldest = (points.t.at(-1) ?? 0) - SERIES_SECONDS_MAX;
  const first = points.t.findIndex((time) => time >= oldest);
  if (first > 0) {
    points.t = points.t.slice(first);
    points.v = points.v.slice(first);
  }
  series.set(key, points);
}

function applySeries(changes) {
  for (const [key, points] of Object.entries(changes)) addPoints(key, points);
  const touched = new Set(Object.keys(changes).flatMap((key) => [...(listeners.get(key) ?? [])]));
  touched.forEach((callback) => callback());
}

// Puts the rows of a list into the given order; a row for which no HTML came stays as it is.
function applyRows(list, keys, pieces) {
  const rows = new Map([...list.children].map((row) => [row.dataset.key, row]));
  const name = list.dataset.rows;
  const wanted = keys.map((key) => {
    const html = pieces[`row:${name}:${key}`];
    const row = rows.get(key);
    if (html === undefined) return row;
    const made = parse(html).firstElementChild;
    if (!row) return made;
    morph(row, made);
    return row;
  }).filter(Boolean);
  const kept = new Set(wanted);
  for (const row of rows.values()) if (!kept.has(row)) row.remove();
  wanted.forEach((row, index) => {
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
  });
}

// Tells whether the first rows came for a page that had nothing to list, and so has no list to put them into.
function hasFirstRows(pieces) {
  if (!document.querySelector(".empty")) return false;
  return Object.entries(pieces).some(([name, order]) => name.startsWith("rows:") && order !== "[]" &&
    !document.querySelector(`[data-rows="${name.slice("rows:".length)}"]`));
}

function applyFigures(pieces) {
  if (hasFirstRows(pieces)) {
    location.reload();
    return;
  }
  for (const block of document.querySelectorAll("[data-block]")) {
    const html = pieces[`block:${block.dataset.block}`];
    if (html !== undefined) morphChildren(block, parse(html));
  }
  for (const list of document.querySelectorAll("[data-rows]")) {
    const order = pieces[`rows:${list.dataset.rows}`];
    if (order !== undefined) list.dataset.order = order;
    const keys = list.dataset.order ? JSON.parse(list.dataset.order) : [...list.children].map((row) => row.dataset.key);
    applyRows(list, keys, pieces);
  }
  document.dispatchEvent(new CustomEvent("figures"));
}

function show(state, text) {
  const indicator = document.querySelector(".live");
  if (!indicator) return;
  indicator.dataset.state = state;
  indicator.querySelector("span").textContent = text;
  indicator.title = text;
}

function address() {
  const page = encodeURIComponent((location.pathname.slice(base.length) || "/") + location.search);
  return `${base}/events?page=${page}`;
}

// A browser gives a stream up that was answered by an error: by a proxy whose nsqadmin is away, by an nsqadmin with too
// many open pages, or after the end of a login, where the page leads to the next one.
async function retry() {
  const asking = new AbortController();
  const answer = await fetch(address(), { signal: asking.signal }).catch(() => null);
  asking.abort();
  if (!source) return;
  if (answer?.status === 401) location.reload();
  else if (answer?.ok) open();
  else retryTimer = setTimeout(retry, RETRY_MS);
}

function open() {
  source = new EventSource(address());
  source.addEventListener("open", () => {
    // A stream begins with the whole past, even when it comes back after a break.
    series.clear();
    show("live", "Live");
  });
  source.addEventListener("error", (event) => {
    show("lost", "Reconnecting");
    if (event.target.readyState === EventSource.CLOSED) retryTimer = setTimeout(retry, RETRY_MS);
  });
  source.addEventListener("figures", (event) => {
    show("live", "Live");
    applyFigures(JSON.parse(event.data));
  });
  source.addEventListener("series", (event) => applySeries(JSON.parse(event.data)));
}

function close() {
  clearTimeout(retryTimer);
  source?.close();
  source = null;
  show("paused", "Paused");
}

export function reconnect() {
  close();
  open();
}

export function connect() {
  open();
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiddenTimer);
    if (document.hidden) hiddenTimer = setTimeout(close, HIDDEN_MS_MAX);
    else if (!source) open();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => {
    if (event.persisted && !source) open();
  });
}
