// One message of the browser: a line, and its body as JSON, text or hex when it is opened.
import { ask, showBusy, showResult } from "./confirm.js";
import { make } from "./dom.js";
import { bytes, exact } from "./format.js";
import { base, post } from "./http.js";
import { hexDump, tree } from "./json.js";

const PREVIEW_CHARS = 200;
const SAFE_INTEGER_DIGITS = 16;

const bodyOf = (text) => make("pre", { class: "body", tabindex: "0" }, text);

export const onePath = (topic, message) => (
  `/topics/${encodeURIComponent(topic)}/messages/${encodeURIComponent(message.node)}/${message.seq}`);

export function messageRow(topic, message, mayRepublish) {
  const preview = message.is_text ? message.text.slice(0, PREVIEW_CHARS).replace(/\s+/g, " ") : "not text";
  const line = make("summary", {},
    make("local-time", { at: message.timestamp_ns / 1e9, as: "time" }),
    make("span", { class: "seq" }, String(message.seq)),
    make("span", { class: `preview${message.is_text ? "" : " faint"}` }, preview),
    make("span", { class: "size", title: `${exact(message.bytes)} bytes` }, bytes(message.bytes)));
  const details = make("details", {}, line);
  details.addEventListener("toggle", () => details.append(opened(topic, message, mayRepublish)), { once: true });
  return make("li", { "data-seq": message.seq }, details);
}

function opened(topic, message, mayRepublish) {
  const place = make("div", {});
  const views = { JSON: () => showJson(message), Text: () => bodyOf(message.text), Hex: () => showHex(topic, message, place) };
  const offered = Object.keys(views).filter((name) => name === "Hex" || (message.is_text && (name === "Text" || isWholeJson(message))));
  const buttons = offered.map((name) => make("button", { type: "button", "aria-pressed": "false", onclick: () => choose(name) }, name));
  function choose(name) {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === name)));
    const shown = views[name]();
    if (shown) place.replaceChildren(shown);
  }
  choose(offered[0]);
  const actions = make("div", { class: "actions" }, make("div", { class: "segments", role: "group", "aria-label": "Show the body as" }, ...buttons),
    make("a", { class: "button", href: `${base}${onePath(topic, message)}?download=1`, download: true }, "Download"),
    mayRepublish ? make("button", { type: "button", class: "button", onclick: () => republish(topic, message) }, "Republish") : null);
  const meta = make("p", { class: "meta" }, ...[["id", message.id], ["sequence", message.seq], ["nsqd", message.node], ["bytes", exact(message.bytes)]]
    .map(([name, value]) => make("span", {}, make("b", {}, name), make("span", { class: "mono" }, String(value)))));
  const cut = message.is_cut ? make("p", { class: "hint" }, "The body is longer than is shown here; download it to see all.") : null;
  return make("div", { class: "opened" }, meta, actions, place, cut);
}

function isWholeJson(message) {
  return message.is_json && !message.is_cut;
}

// A number that JavaScript would round is shown as the text it was.
function showJson(message) {
  try {
    return tree(JSON.parse(message.text, (key, value, context) => (
      typeof value === "number" && context?.source?.length > SAFE_INTEGER_DIGITS ? context.source : value)));
  } catch {
    return bodyOf(message.text);
  }
}

function showHex(topic, message, place) {
  if (message.is_text && !message.is_cut) return bodyOf(hexDump(new TextEncoder().encode(message.text)));
  fetch(`${base}${onePath(topic, message)}?download=1`, { credentials: "same-origin" })
    .then((response) => (response.ok ? response.arrayBuffer() : Promise.reject(new Error(`nsqadmin answered ${response.status}`))))
    .then((buffer) => place.replaceChildren(bodyOf(hexDump(new Uint8Array(buffer)))))
    .catch((error) => place.replaceChildren(make("p", { class: "error" }, `The bytes could not be read: ${error.message}`)));
  return make("p", { class: "faint" }, "Reading …");
}

async function republish(topic, message) {
  const title = "Republish this message";
  const text = `A copy of message ${message.seq} is published to ${topic} on ${message.node}, as a new message for all of its channels.`;
  if (!await ask({ title, text, verb: "Republish" })) return;
  showBusy("Publishing …");
  showResult({ title, answer: await post(`${onePath(topic, message)}/republish`, {}), isStaying: true });
}
