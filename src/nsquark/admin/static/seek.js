// Seeks a channel, but first shows how many messages would come again or be passed over on each nsqd, and asks.
import { localInput, position, showFields } from "./choices.js";
import { ask, showBusy, showResult } from "./confirm.js";
import { make } from "./dom.js";
import { exact } from "./format.js";
import { post, request } from "./http.js";

const HOUR_MS = 3_600_000;
const card = document.getElementById("seek");

function previewTable(nodes) {
  const head = ["nsqd", "come again", "passed over", "in flight", "requeued"];
  const row = (node) => make("tr", {}, make("td", { class: "name" }, node.node),
    ...["again", "passed", "in_flight", "requeued"].map((name, index) => (
      make("td", { "data-label": head[index + 1] }, node[name] === undefined || node[name] === null ? "–" : exact(node[name])))));
  return make("table", { class: "table", id: "seek-preview" },
    make("thead", {}, make("tr", {}, ...head.map((text, index) => make("th", { scope: "col", class: index ? "" : "name" }, text)))),
    make("tbody", {}, ...nodes.map(row)));
}

function summary({ again, passed }) {
  const parts = [];
  if (again) parts.push(`${exact(again)} messages come again`);
  if (passed) parts.push(`${exact(passed)} are passed over`);
  return parts.length ? `${parts.join(", ")}.` : "No message comes again and none is passed over.";
}

async function seek(form) {
  const values = Object.fromEntries(new FormData(form));
  const to = position(values.kind, values, "");
  const trouble = card.querySelector(".error");
  trouble.textContent = to === null ? "Give a time or a sequence number." : "";
  if (to === null) return;
  const { topic, channel } = card.dataset;
  const path = `/topics/${encodeURIComponent(topic)}/${encodeURIComponent(channel)}`;
  const query = new URLSearchParams(values.node ? { to, node: values.node } : { to });
  const preview = await request(`${path}/seek.json?${query}`);
  if (!preview.ok) {
    trouble.textContent = preview.reason || preview.message || "The preview could not be made.";
    return;
  }
  const title = `Seek ${channel}`;
  const details = [previewTable(preview.nodes)];
  for (const failure of preview.failures ?? []) details.push(make("p", { class: "error" }, `${failure.node}: ${failure.text}`));
  if (!await ask({ title, text: summary(preview), verb: "Seek", isDangerous: preview.passed > 0, details })) return;
  showBusy("Moving the channel …");
  showResult({ title, answer: await post(`${path}/seek?${query}`, {}) });
}

if (card) {
  const form = card.querySelector("form");
  form.time.value = localInput(new Date(Date.now() - HOUR_MS));
  form.kind.addEventListener("change", () => showFields(form, form.kind.value));
  showFields(form, form.kind.value);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    seek(form);
  });
}
