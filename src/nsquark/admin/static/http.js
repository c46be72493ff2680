// Makes requests to nsqadmin itself, under its base path and with its token against forged requests.
export const base = document.documentElement.dataset.base;

const token = () => document.querySelector('meta[name="csrf"]').content;

async function answer(response) {
  const text = await response.text();
  let content;
  try {
    content = JSON.parse(text);
  } catch {
    content = { message: text.slice(0, 500) };
  }
  if (response.status === 401) location.assign(`${base}/login?next=${encodeURIComponent(location.pathname)}`);
  return { ok: response.ok, status: response.status, ...content };
}

// Returns `{ok, status, ...the JSON of the answer}`, even if the request could not be made.
export async function request(path, options = {}) {
  try {
    return await answer(await fetch(base + path, { credentials: "same-origin", ...options }));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { ok: false, status: 0, message: "nsqadmin does not answer" };
  }
}

// Sends a change with any body, and with the token that proves that one of our pages asks.
export const send = (path, body, type) => (
  request(path, { method: "POST", headers: { "X-CSRF-Token": token(), "Content-Type": type }, body }));

export const post = (path, content) => send(path, JSON.stringify(content), "application/json");
