// Every change asks first, then shows what each nsqd answered. A button has data-action (JSON for POST /action),
// data-title and data-text; with data-type-name the name must be typed; data-then is the page to open when it is done.
import { byId, make } from "./dom.js";
import { base, post } from "./http.js";

const dialog = byId("confirm");
const body = dialog?.querySelector(".dialog-body");
const foot = dialog?.querySelector(".dialog-foot");

const button = (text, className, onclick) => make("button", { type: "button", class: `button ${className}`, onclick }, text);

// Asks the user to confirm, with `details` as elements below the text. Resolves to whether the user did.
export function ask({ title, text, verb, isDangerous, typeName, details = [] }) {
  return new Promise((resolve) => {
    const yes = button(verb, isDangerous ? "danger primary" : "primary", () => resolve(true));
    const no = button("Cancel", "", () => dialog.close());
    const parts = [make("h2", { id: "confirm-title" }, title), make("p", { class: "soft anywhere" }, text), ...details];
    let typed = null;
    if (typeName) {
      typed = make("input", { id: "confirm-name", autocomplete: "off", spellcheck: "false" });
      parts.push(make("div", { class: "field" }, make("label", { for: "confirm-name" }, `Type ${typeName} to go on`), typed));
      yes.disabled = true;
      typed.addEventListener("input", () => { yes.disabled = typed.value !== typeName; });
      typed.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && !yes.disabled) yes.click();
      });
    }
    body.replaceChildren(...parts);
    foot.replaceChildren(no, yes);
    dialog.addEventListener("close", () => resolve(false), { once: true });
    if (!dialog.open) dialog.showModal();
    (typed ?? (isDangerous ? no : yes)).focus();
  });
}

export function resultList(results) {
  return make("ul", { class: "results" }, ...results.map((result) => make("li", { class: result.ok ? "ok" : "bad" },
    make("span", {}, result.address), make("span", { class: result.ok ? "faint" : "error" }, result.text ?? ""))));
}

export function showResult({ title, answer, then, isStaying }) {
  const results = answer.results ?? [];
  const failed = results.filter((result) => !result.ok).length;
  let verdict = answer.reason || answer.message || "It was not done.";
  if (answer.message === "FORBIDDEN") verdict = "You may not do this. Ask an administrator, or sign in with another name.";
  else if (answer.ok && failed) verdict = `Done on ${results.length - failed} of ${results.length}; the rest did not answer as they should.`;
  else if (answer.ok) verdict = "Done.";
  const state = answer.ok ? (failed ? "warn" : "ok") : "bad";
  body.replaceChildren(make("h2", { id: "confirm-title" }, title),
    make("p", { class: `notice ${state}`, role: "status" }, verdict), ...(results.length ? [resultList(results)] : []));
  const close = button("Close", "primary", () => dialog.close());
  foot.replaceChildren(close);
  const leave = () => (then ? location.assign(base + then) : location.reload());
  if (answer.ok && !isStaying) dialog.addEventListener("close", leave, { once: true });
  if (!dialog.open) dialog.showModal();
  close.focus();
}

export function showBusy(text) {
  body.append(make("p", { class: "faint", role: "status" }, text));
  foot.querySelectorAll("button").forEach((each) => { each.disabled = true; });
}

document.addEventListener("click", async (event) => {
  const source = event.target.closest("[data-action]");
  if (!source) return;
  const { action, title, text, verb, typeName, then } = source.dataset;
  const isDangerous = source.classList.contains("danger");
  if (!await ask({ title, text, verb: verb || source.textContent.trim(), isDangerous, typeName })) return;
  showBusy("Asking every nsqd that has it …");
  showResult({ title, answer: await post("/action", JSON.parse(action)), then });
});

document.addEventListener("submit", async (event) => {
  const form = event.target.closest("[data-create]");
  if (!form) return;
  event.preventDefault();
  const { topic, channel } = Object.fromEntries(new FormData(form));
  const title = channel ? `Create channel ${channel} of ${topic}` : `Create topic ${topic}`;
  if (!await ask({ title, text: "It is made at every nsqlookupd, a channel at every nsqd that has the topic too.", verb: "Create" })) return;
  showBusy("Creating …");
  showResult({ title, answer: await post("/action", { action: "create", topic, channel }), then: "/lookup" });
});
