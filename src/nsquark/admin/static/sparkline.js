// <spark-line values="1,2,,4"> draws a small area under a line, from zero, with a gap where no value is known.
import { svg } from "./dom.js";

const WIDTH = 96;
const HEIGHT = 26;
const PAD = 2;

class SparkLine extends HTMLElement {
  static observedAttributes = ["values"];

  connectedCallback() {
    this.draw();
  }

  attributeChangedCallback() {
    if (this.isConnected) this.draw();
  }

  draw() {
    const values = (this.getAttribute("values") ?? "").split(",").map((text) => (text === "" ? null : Number(text)));
    const highest = Math.max(0, ...values.filter((value) => value !== null));
    const known = values.filter((value) => value !== null).length;
    this.replaceChildren();
    if (known < 2) return;
    const x = (index) => ((index / (values.length - 1)) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - PAD - (highest ? (value / highest) * (HEIGHT - 2 * PAD) : 0)).toFixed(1);
    const runs = [[]];
    values.forEach((value, index) => {
      if (value === null) runs.push([]);
      else runs.at(-1).push([x(index), y(value)]);
    });
    const drawn = runs.filter((run) => run.length > 1);
    const line = drawn.map((run) => `M${run.map((point) => point.join(" ")).join("L")}`).join("");
    const area = drawn.map((run) => `M${run[0][0]} ${HEIGHT}L${run.map((point) => point.join(" ")).join("L")}L${run.at(-1)[0]} ${HEIGHT}Z`).join("");
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    picture.append(svg("path", { class: "area", d: area }), svg("path", { class: "stroke", d: line }));
    this.append(picture);
  }
}

customElements.define("spark-line", SparkLine);
