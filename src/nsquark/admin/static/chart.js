// <time-chart lines='[{"key","label","kind","axis"}]' unit="rate|count|seconds|bytes" unit2="…"> draws series as SVG.
// Lines with axis 2 have their own scale at the right. The user chooses the span of time that is drawn.
import { drawCursor, followPointer, hasCursor } from "./cursor.js";
import { svg } from "./dom.js";
import { onSeries, pointsOf } from "./events.js";
import { formatters } from "./format.js";
import { timeTicks, valueTicks } from "./scales.js";

const MARGIN = { left: 46, right: 12, top: 8, bottom: 22 };
const MARGIN_AXIS2 = 46;
const SPAN_KEY = "chart-span";
const SPAN_S_MIN = 60; // a chart covers at least this much, even right after a start, when less is known
const GAP_SECONDS = 30;
const VALUE_STEPS = 4;
const PIXELS_PER_TIME_LABEL = 90;

const charts = new Set();
const span = () => Number(localStorage.getItem(SPAN_KEY)) || 900;
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const clockSeconds = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

class TimeChart extends HTMLElement {
  static observedAttributes = ["lines"];

  connectedCallback() {
    charts.add(this);
    this.tabIndex = 0;
    this.setAttribute("role", "img");
    this.setAttribute("aria-label", this.getAttribute("name")); // until it is drawn, and has values to tell
    this.resizes = new ResizeObserver(() => this.schedule());
    this.resizes.observe(this);
    followPointer(this, charts);
    this.listen();
  }

  disconnectedCallback() {
    charts.delete(this);
    this.resizes.disconnect();
    this.stops.forEach((stop) => stop());
  }

  attributeChangedCallback() {
    if (this.isConnected && this.stops) this.listen();
  }

  listen() {
    this.stops?.forEach((stop) => stop());
    this.lines = JSON.parse(this.getAttribute("lines"));
    this.stops = this.lines.map((line) => onSeries(line.key, () => this.schedule()));
    this.schedule();
  }

  schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  format(line) {
    return formatters[this.getAttribute(line.axis === 2 ? "unit2" : "unit")] ?? formatters.count;
  }

  draw() {
    const { width, height } = this.getBoundingClientRect();
    if (width < 60) return;
    const hasSecond = this.lines.some((line) => line.axis === 2);
    const right = width - (hasSecond ? MARGIN_AXIS2 : MARGIN.right);
    const data = this.lines.map((line) => pointsOf(line.key));
    const now = Math.max(...data.map((points) => points.t.at(-1) ?? 0)) || Date.now() / 1000;
    const first = Math.min(...data.map((points) => points.t[0] ?? now));
    const from = Math.max(now - span(), Math.min(first, now - SPAN_S_MIN));
    this.view = { from, to: now, left: MARGIN.left, right, top: MARGIN.top, bottom: height - MARGIN.bottom, data };
    this.view.scales = [1, 2].map((axis) => this.scaleOf(axis));
    const picture = svg("svg", { width, height, "aria-hidden": "true" });
    this.drawAxes(picture, hasSecond);
    this.lines.forEach((line, index) => picture.append(...this.drawLine(line, data[index])));
    if (data.every((points) => points.t.length < 2)) {
      const at = { class: "empty", x: (this.view.left + right) / 2, y: height / 2, "text-anchor": "middle" };
      picture.append(svg("text", at, "Waiting for a second measurement"));
    }
    this.replaceChildren(picture);
    this.describe();
    if (hasCursor()) drawCursor(this);
  }

  scaleOf(axis) {
    const { data, from } = this.view;
    let highest = 0;
    this.lines.forEach((line, index) => {
      if ((line.axis ?? 1) !== axis) return;
      data[index].v.forEach((value, at) => {
        if (value > highest && data[index].t[at] >= from) highest = value;
      });
    });
    const unit = this.getAttribute(axis === 2 ? "unit2" : "unit");
    const ticks = valueTicks(highest, VALUE_STEPS, unit === "count");
    return { ticks, highest: ticks.at(-1) };
  }

  x(time) {
    const { from, to, left, right } = this.view;
    return left + ((time - from) / (to - from)) * (right - left);
  }

  y(value, axis) {
    const { top, bottom, scales } = this.view;
    return bottom - (value / scales[(axis ?? 1) - 1].highest) * (bottom - top);
  }

  drawAxes(picture, hasSecond) {
    const { left, right, bottom, from, to, scales } = this.view;
    for (const value of scales[0].ticks) {
      const y = Math.round(this.y(value)) + 0.5;
      picture.append(svg("line", { class: "gridline", x1: left, x2: right, y1: y, y2: y }));
      picture.append(svg("text", { class: "axis", x: left - 8, y: y + 4, "text-anchor": "end" }, this.format({})(value)));
    }
    if (hasSecond) {
      for (const value of scales[1].ticks) {
        const label = this.format({ axis: 2 })(value);
        picture.append(svg("text", { class: "axis", x: right + 8, y: this.y(value, 2) + 4 }, label));
      }
    }
    const { ticks, step } = timeTicks(from, to, Math.max(2, (right - left) / PIXELS_PER_TIME_LABEL));
    for (const time of ticks) {
      const x = this.x(time);
      if (x < left + 12 || x > right - 12) continue;
      picture.append(svg("line", { class: "gridline", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      const text = (step < 60 ? clockSeconds : clock).format(new Date(time * 1000));
      picture.append(svg("text", { class: "axis", x, y: bottom + 17, "text-anchor": "middle" }, text));
    }
  }

  drawLine(line, { t, v }) {
    const { from, bottom } = this.view;
    const runs = [];
    let last = -Infinity;
    t.forEach((time, index) => {
      if (time < from || v[index] === null) return;
      if (time - last > GAP_SECONDS) runs.push([]);
      runs.at(-1).push(`${this.x(time).toFixed(1)} ${this.y(v[index], line.axis).toFixed(1)}`);
      last = time;
    });
    const path = runs.map((run) => `M${run.join("L")}`).join("");
    const ends = (run) => [run[0], run.at(-1)].map((point) => point.split(" ")[0]);
    const area = runs.map((run) => `M${ends(run)[0]} ${bottom}L${run.join("L")}L${ends(run)[1]} ${bottom}Z`).join("");
    const group = svg("g", { class: `c-${line.kind}` });
    group.append(svg("path", { class: "area", d: area }), svg("path", { class: "stroke", d: path, "data-line": line.key }));
    return [group];
  }

  // Shows the newest values in the legend, and in words for those who do not see the picture.
  describe() {
    const words = this.lines.map((line, index) => {
      const value = this.view.data[index].v.at(-1);
      const text = value === undefined || value === null ? "–" : this.format(line)(value);
      const legend = this.closest(".card")?.querySelector(`[data-last="${CSS.escape(line.key)}"]`);
      if (legend && legend.textContent !== text) legend.textContent = text;
      return `${line.label} ${text}`;
    });
    this.setAttribute("aria-label", `${this.getAttribute("name")}: ${words.join(", ")}`);
  }
}

customElements.define("time-chart", TimeChart);

function chooseSpan(seconds) {
  localStorage.setItem(SPAN_KEY, seconds);
  showSpan();
  charts.forEach((chart) => chart.schedule());
}

function showSpan() {
  for (const button of document.querySelectorAll("[data-span]")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.span) === span()));
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-span]");
  if (button) chooseSpan(Number(button.dataset.span));
});
showSpan();
