// <local-time at="unix seconds" as="time|precise|ago|age"> shows a time in the reader's zone, and exactly on hover.
import { duration } from "./format.js";

const REFRESH_MS = 1000;

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });
const year = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;

export function clockTime(unix) {
  const date = new Date(unix * 1000);
  const now = new Date();
  const time = clock.format(date);
  if (date.toDateString() === now.toDateString()) return time;
  return `${(date.getFullYear() === now.getFullYear() ? day : year).format(date)}, ${time}`;
}

// Writes a time with milliseconds and the zone, so that a person can compare it with a log.
export function exactTime(unix) {
  const date = new Date(unix * 1000);
  const offset = -date.getTimezoneOffset();
  const local = new Date(date.getTime() + offset * 60_000).toISOString().replace("T", " ").replace("Z", "");
  const sign = offset < 0 ? "-" : "+";
  const two = (number) => String(Math.floor(Math.abs(number))).padStart(2, "0");
  return `${local} ${sign}${two(offset / 60)}:${two(offset % 60)} (${zone})`;
}

class LocalTime extends HTMLElement {
  static observedAttributes = ["at", "as", "title"]; // an update of the page takes the title away

  connectedCallback() {
    this.draw();
  }

  attributeChangedCallback() {
    if (this.isConnected) this.draw();
  }

  draw() {
    const at = Number(this.getAttribute("at"));
    if (!at) return;
    const form = this.getAttribute("as");
    const since = Date.now() / 1000 - at;
    let text = clockTime(at);
    if (form === "precise") text += `.${String(Math.floor((at % 1) * 1000)).padStart(3, "0")}`;
    else if (form === "age") text = duration(since);
    else if (form === "ago") text = since < 0 ? `in ${duration(-since)}` : `${duration(since)} ago`;
    if (this.textContent !== text) this.textContent = text;
    const exact = exactTime(at);
    if (this.title !== exact) this.title = exact;
  }
}

customElements.define("local-time", LocalTime);
setInterval(() => {
  for (const element of document.querySelectorAll('local-time[as="ago"], local-time[as="age"]')) element.draw();
}, REFRESH_MS);
