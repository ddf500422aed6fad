// The end of an engine's log, followed while the dialog is open.
import { find, load, make, text } from "./elements.js";

const LINES = 200, EVERY_MS = 2000;
let timer = 0, shown = "";

export function openLog(engineId) {
  const dialog = find("log");
  shown = engineId;
  text("log-title", `Log of ${engineId}`);
  text("log-note", "Loading…");
  find("log-lines").replaceChildren();
  if (!dialog.open) dialog.showModal();
  read(engineId);
}

async function read(engineId) {
  clearTimeout(timer);
  try {
    const { tail } = await load(`api/engines/${encodeURIComponent(engineId)}/log?lines=${LINES}`);
    if (shown === engineId) show(tail);
  } catch (error) {
    if (shown === engineId) text("log-note", `The log cannot be read: ${error.message}`);
  }
  // The next request begins after the reply: a slow server is not asked twice at once.
  if (shown === engineId && find("log-follow").checked) timer = setTimeout(() => read(engineId), EVERY_MS);
}

function show(tail) {
  const lines = tail ? tail.split("\n") : [], box = find("log-lines");
  text("log-note", lines.length > 1 ? `The last ${lines.length} lines.` : lines.length ? "Its only line so far." : "It has written nothing yet.");
  if (box.textContent === tail) return;
  const isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
  const isFirst = !box.textContent;
  box.replaceChildren(make("code", {}, tail));
  if (isAtEnd || isFirst) box.scrollTop = box.scrollHeight;
}

find("log").addEventListener("close", () => { shown = ""; clearTimeout(timer); });
find("log-close").addEventListener("click", () => find("log").close());
find("log-follow").addEventListener("change", () => { if (shown) read(shown); });
