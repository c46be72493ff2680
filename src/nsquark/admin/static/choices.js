// Shows the fields of a form that belong to the chosen kind of position in a log, and hides the others.
export function showFields(form, choice) {
  for (const field of form.querySelectorAll("[data-for]")) field.hidden = field.dataset.for !== choice;
}

// Returns "time:<ms>", the sequence number behind `seqPrefix`, or the choice itself; null if a value is missing.
export function position(choice, { time, seq }, seqPrefix) {
  if (choice === "time") {
    const ms = new Date(time).getTime();
    return Number.isNaN(ms) ? null : `time:${ms}`;
  }
  if (choice === "seq") return /^[0-9]+$/.test(seq) ? seqPrefix + seq : null;
  return choice;
}

// Writes a date for <input type="datetime-local">, which has no zone of its own.
export function localInput(date) {
  return new Date(date.getTime() - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}
