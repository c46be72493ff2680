// Lists the messages of a channel that are in flight, with how long, or requeued, with when they are due.
import { make } from "./dom.js";
import { exact, seconds } from "./format.js";
import { request } from "./http.js";

const REFRESH_MS = 3000;
const SHOWN_MAX = 50;
const card = document.getElementById("held");
let state = "in_flight";
let isAsking = false;

const COLUMNS = {
  in_flight: [["attempts", (each) => exact(each.attempts)], ["for", (each) => seconds((each.for_ms ?? 0) / 1000)], ["with", (each) => each.client ?? ""]],
  requeued: [["attempts", (each) => exact(each.attempts)], ["due", (each) => due(each.due_ms ?? 0)]],
};

const NONE = { in_flight: "No message is in flight", requeued: "No message is requeued" };
const ORDER = { in_flight: "longest in flight first", requeued: "next due first" };

const due = (ms) => (ms <= 0 ? "now" : `in ${seconds(ms / 1000)}`);

function draw(answer) {
  const columns = COLUMNS[state];
  const [head, body] = [card.querySelector("thead"), card.querySelector("tbody")];
  head.replaceChildren(make("tr", {}, make("th", { class: "name", scope: "col" }, "Message"), make("th", { scope: "col" }, "nsqd"),
    ...columns.map(([name]) => make("th", { scope: "col" }, name))));
  body.replaceChildren(...answer.messages.map((each) => {
    const href = `${card.dataset.messages}?at=seq&seq=${each.seq}&node=${encodeURIComponent(each.node)}`;
    return make("tr", {}, make("td", { class: "name mono" }, make("a", { href }, String(each.seq))), make("td", { "data-label": "nsqd" }, each.node),
      ...columns.map(([name, value]) => make("td", { "data-label": name }, value(each))));
  }));
  const failures = (answer.failures ?? []).map((failure) => `${failure.node}: ${failure.text}`);
  const count = answer.messages.length ? `${answer.messages.length} shown, ${ORDER[state]}` : NONE[state];
  card.querySelector("[role=status]").textContent = [count, ...failures].join(" · ");
}

async function refresh() {
  if (isAsking || document.hidden || card.contains(document.activeElement?.closest("tbody"))) return;
  isAsking = true;
  const { topic, channel } = card.dataset;
  const path = `/topics/${encodeURIComponent(topic)}/${encodeURIComponent(channel)}/messages.json`;
  const asked = state;
  const answer = await request(`${path}?state=${asked}&limit=${SHOWN_MAX}`);
  isAsking = false;
  if (asked !== state) refresh();
  else if (answer.ok) draw(answer);
  else card.querySelector("[role=status]").textContent = answer.message;
}

if (card) {
  for (const button of card.querySelectorAll("[data-state]")) {
    button.addEventListener("click", () => {
      state = button.dataset.state;
      card.querySelectorAll("[data-state]").forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
      refresh();
    });
  }
  refresh();
  setInterval(refresh, REFRESH_MS);
}
