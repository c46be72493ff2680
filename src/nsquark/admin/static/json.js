// Draws a JSON value as a coloured tree that folds. Folded parts are made when they are opened.
import { make } from "./dom.js";

// A number as it was written, where JavaScript would round it or write it in another way.
class Written {
  constructor(text) {
    this.text = text;
  }
}

// Parses JSON for `tree`. An older browser does not tell how a number was written, and shows it as JavaScript does.
export const parse = (text) => JSON.parse(text, (key, value, context) => (
  typeof value === "number" && context?.source !== undefined && context.source !== String(value) ? new Written(context.source) : value));

const OPEN_DEPTH = 2;
const CHILDREN_MAX = 500;

export function tree(value) {
  return make("div", { class: "body json", tabindex: "0" }, ...nodes(value, 0, ""));
}

// Makes the elements of a value; `comma` follows it on the same line.
function nodes(value, depth, comma) {
  if (value === null || typeof value === "boolean") return [make("span", { class: "word" }, String(value)), comma];
  if (typeof value === "number") return [make("span", { class: "number" }, String(value)), comma];
  if (value instanceof Written) return [make("span", { class: "number" }, value.text), comma];
  if (typeof value === "string") return [make("span", { class: "string" }, JSON.stringify(value)), comma];
  return [branch(value, depth, comma)];
}

function branch(value, depth, comma) {
  const isList = Array.isArray(value);
  const [opening, bracket] = isList ? "[]" : "{}";
  const closing = bracket + comma;
  const entries = Object.entries(value);
  if (!entries.length) return make("span", {}, opening + closing);
  const kids = make("span", { class: "kids" });
  const label = `${entries.length} ${isList ? "item" : "field"}${entries.length === 1 ? "" : "s"}`;
  const fold = make("span", { class: "fold" }, ` ${label} ${closing}`);
  const details = make("details", { open: depth < OPEN_DEPTH }, make("summary", {}, opening, fold), kids, closing);
  const fill = () => {
    if (kids.childElementCount) return;
    kids.append(...entries.slice(0, CHILDREN_MAX).map(([key, child], index) => make("div", {},
      isList ? null : make("span", { class: "key" }, JSON.stringify(key)), isList ? null : ": ",
      ...nodes(child, depth + 1, index < entries.length - 1 ? "," : ""))));
    if (entries.length > CHILDREN_MAX) kids.append(make("div", { class: "fold" }, `and ${entries.length - CHILDREN_MAX} more`));
  };
  if (details.open) fill();
  else details.addEventListener("toggle", fill, { once: true });
  return details;
}

// A row of a hex dump has an offset, this many bytes, and those of them that can be printed.
const HEX_ROW = 16;
const HEX_BYTES_MAX = 65_536;

export function hexDump(bytes) {
  const lines = [];
  for (let at = 0; at < Math.min(bytes.length, HEX_BYTES_MAX); at += HEX_ROW) {
    const row = [...bytes.subarray(at, at + HEX_ROW)];
    const hex = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(HEX_ROW * 3 - 1);
    const text = row.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${hex}  ${text}`);
  }
  if (bytes.length > HEX_BYTES_MAX) lines.push(`… ${bytes.length - HEX_BYTES_MAX} more bytes`);
  return lines.join("\n");
}
