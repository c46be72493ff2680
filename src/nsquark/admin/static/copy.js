// Makes the button beside a command copy the command.
const SHOWN_MS = 1500;

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = button.parentElement.querySelector("code, pre");
  const isCopied = await copy(button.dataset.copy || source.textContent);
  if (!isCopied && source) getSelection().selectAllChildren(source);
  const label = button.textContent;
  button.textContent = isCopied ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { button.textContent = label; }, SHOWN_MS);
});
