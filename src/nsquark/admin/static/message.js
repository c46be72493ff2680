// Shows one message of the message browser: a line, and its body as JSON, text or hex when it is opened.
import { ask, showBusy, showResult } from "./confirm.js";
import { make } from "./dom.js";
import { exact, size } from "./format.js";
import { base, post, request } from "./http.js";
import { hexDump, parse, tree } from "./json.js";

const PREVIEW_CHARS = 200;

const bodyOf = (text) => make("pre", { class: "body", tabindex: "0" }, text);

export const onePath = (topic, message) => (
  `/messages/${encodeURIComponent(topic)}/${encodeURIComponent(message.node)}/${message.seq}`);

export function messageRow(topic, message, mayRepublish) {
  const preview = message.is_text ? message.text.slice(0, PREVIEW_CHARS).replace(/\s+/g, " ") : "not text";
  const line = make("summary", {},
    make("local-time", { at: message.timestamp_ns / 1e9, as: "precise" }),
    make("span", { class: "seq" }, String(message.seq)),
    make("span", { class: `preview${message.is_text ? "" : " faint"}` }, preview),
    make("span", { class: "size", title: `${exact(message.bytes)} bytes` }, size(message.bytes)));
  const details = make("details", {}, line);
  details.addEventListener("toggle", () => details.append(opened(topic, message, mayRepublish)), { once: true });
  return make("li", { "data-seq": message.seq }, details);
}

function opened(topic, message, mayRepublish) {
  const body = make("div", { class: "opened-body" });
  const shown = message.is_cut ? wholeOf(topic, message) : Promise.resolve(message);
  shown.then((whole) => body.append(...bodyViews(whole)));
  const actions = make("div", { class: "actions" },
    make("a", { class: "button", href: `${base}${onePath(topic, message)}?download=1`, download: true }, "Download"),
    mayRepublish ? make("button", { type: "button", class: "button", onclick: () => republish(topic, message) }, "Republish") : null);
  const facts = [["id", message.id], ["sequence", message.seq], ["nsqd", message.node], ["bytes", exact(message.bytes)], ...Object.entries(message.headers ?? {})];
  const meta = make("p", { class: "meta" }, ...facts.map(([name, value]) => make("span", {}, make("b", {}, name), make("span", { class: "mono" }, String(value)))));
  return make("div", { class: "opened" }, meta, body, actions);
}

// Fetches a message with more of its body, since a page has only the beginning of long bodies.
async function wholeOf(topic, message) {
  const answer = await request(onePath(topic, message));
  return answer.ok ? answer : message;
}

function bodyViews(message) {
  const views = { JSON: () => showJson(message), Text: () => bodyOf(message.text), Hex: () => bodyOf(hexDump(bytesOf(message))) };
  const isTree = message.is_json && !message.is_cut;
  const offered = Object.keys(views).filter((name) => name === "Hex" || (message.is_text && (name === "Text" || isTree)));
  const place = make("div", {});
  const buttons = offered.map((name) => make("button", { type: "button", "aria-pressed": "false", onclick: () => choose(name) }, name));
  function choose(name) {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.textContent === name)));
    place.replaceChildren(views[name]());
  }
  choose(offered[0]);
  const cut = message.is_cut ? [make("p", { class: "hint" }, "The body is longer than is shown here; download it to see all.")] : [];
  return [make("div", { class: "segments", role: "group", "aria-label": "Show the body as" }, ...buttons), place, ...cut];
}

function bytesOf(message) {
  if (message.is_text) return new TextEncoder().encode(message.text);
  return Uint8Array.from(atob(message.base64), (char) => char.charCodeAt(0));
}

function showJson(message) {
  try {
    return tree(parse(message.text));
  } catch {
    return bodyOf(message.text);
  }
}

async function republish(topic, message) {
  const title = "Republish this message";
  const text = `A copy of message ${message.seq} is published to ${topic} on ${message.node}, as a new message for all of its channels.`;
  if (!await ask({ title, text, verb: "Republish" })) return;
  showBusy("Publishing …");
  showResult({ title, answer: await post(`${onePath(topic, message)}/republish`, {}), isStaying: true });
}
