// Publishes one message, typed or from a file, now or after a delay.
import { ask, showBusy, showResult } from "./confirm.js";
import { byId } from "./dom.js";
import { size } from "./format.js";
import { send } from "./http.js";

const card = byId("publish");
const form = card?.querySelector("form");

async function publish() {
  const file = form.file.files[0];
  const body = file ?? new Blob([form.text.value]);
  const { topic } = card.dataset;
  const node = form.node.value;
  if (!body.size) {
    form.text.focus();
    return;
  }
  const delay = Number(form.defer.value) || 0;
  const title = `Publish to ${topic}`;
  const when = delay ? `, to be delivered in ${delay} s` : "";
  const text = `${size(body.size)}${file ? ` from ${file.name}` : ""} to ${node}${when}. Every channel of the topic gets it.`;
  if (!await ask({ title, text, verb: "Publish" })) return;
  showBusy("Publishing …");
  const query = new URLSearchParams({ node, ...(delay ? { defer: Math.round(delay * 1000) } : {}) });
  const answer = await send(`/messages/${encodeURIComponent(topic)}?${query}`, body, "application/octet-stream");
  showResult({ title, answer, isStaying: true });
  if (answer.ok) {
    form.reset();
    document.dispatchEvent(new CustomEvent("published"));
  }
}

form?.addEventListener("submit", (event) => {
  event.preventDefault();
  publish();
});
