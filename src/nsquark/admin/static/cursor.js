// Shows the values of a chart at the moment under the pointer; all charts of a page show the same moment.
import { make, svg } from "./dom.js";
import { exact } from "./format.js";
import { nearest } from "./scales.js";
import { exactTime } from "./times.js";

const TIP_PIXELS = 180;
let moment = null;

export const hasCursor = () => moment !== null;

export function followPointer(chart, charts) {
  const point = (time) => {
    moment = time;
    charts.forEach((other) => drawCursor(other));
  };
  chart.addEventListener("pointermove", (event) => point(timeAt(chart, event.clientX)));
  chart.addEventListener("pointerleave", () => point(null));
  chart.addEventListener("blur", () => point(null));
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !chart.view) return;
    event.preventDefault();
    const { from, to } = chart.view;
    const next = (moment ?? to) + (step * (to - from)) / 60;
    point(Math.min(to, Math.max(from, next)));
  });
}

function timeAt(chart, clientX) {
  if (!chart.view) return null;
  const { from, to, left, right } = chart.view;
  const share = (clientX - chart.getBoundingClientRect().left - left) / (right - left);
  return from + Math.min(1, Math.max(0, share)) * (to - from);
}

function clear(chart) {
  chart.querySelector(".tip")?.remove();
  chart.querySelector(".at")?.remove();
}

export function drawCursor(chart) {
  clear(chart);
  const { view, lines } = chart;
  const picture = chart.querySelector("svg");
  if (moment === null || !view || !picture) return;
  const times = view.data.find((points) => points.t.length)?.t ?? [];
  if (!times.length) return;
  const time = times[nearest(times, moment)];
  if (time < view.from) return;
  const x = chart.x(time);
  const mark = svg("g", { class: "at" });
  mark.append(svg("line", { class: "cursor", x1: x, x2: x, y1: view.top, y2: view.bottom }));
  const tip = make("div", { class: "tip" }, make("div", { class: "faint" }, exactTime(time).slice(11, 19)));
  lines.forEach((line, index) => {
    const { t, v } = view.data[index];
    const value = v[nearest(t, time)];
    if (value === undefined || value === null) return;
    mark.append(svg("circle", { class: `dot c-${line.kind}`, cx: x, cy: chart.y(value, line.axis), r: 3.5 }));
    const swatch = make("i", { class: `swatch c-${line.kind}` });
    tip.append(make("p", { title: exact(value) }, make("span", {}, swatch, line.label), make("b", {}, chart.format(line)(value))));
  });
  picture.append(mark);
  chart.append(tip);
  const isRight = x + TIP_PIXELS > view.right;
  // The content policy allows an element's style object, but no style attributes or blocks.
  tip.style.transform = `translate(${isRight ? x - tip.offsetWidth - 12 : x + 12}px, ${view.top + 4}px)`;
}
