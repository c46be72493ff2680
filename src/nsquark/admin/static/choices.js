// Positions in a log as people give them: fields that belong to a choice are shown while it is made.
export function showFields(form, choice) {
  for (const field of form.querySelectorAll("[data-for]")) field.hidden = field.dataset.for !== choice;
}

// "time:<ms>", "seq" as given, or a word; null if a value is missing.
export function position(choice, { time, seq }, seqPrefix) {
  if (choice === "time") {
    const ms = new Date(time).getTime();
    return Number.isNaN(ms) ? null : `time:${ms}`;
  }
  if (choice === "seq") return /^[0-9]+$/.test(seq) ? seqPrefix + seq : null;
  return choice;
}

// For <input type="datetime-local">, which has no zone of its own.
export function localInput(date) {
  return new Date(date.getTime() - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}
