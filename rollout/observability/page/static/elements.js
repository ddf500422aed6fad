// What all parts of the page use: elements with text, numbers as text, requests with a deadline.
// Values become text nodes, never HTML.

export const find = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function text(id, value) { const node = find(id); if (node.textContent !== String(value)) node.textContent = value; }

const opened = new Set();  // the folded parts that the reader has opened

export function folded(id, summary, ...children) {
  const part = make("details", {}, make("summary", {}, summary), ...children);
  part.open = opened.has(id);
  part.addEventListener("toggle", () => { if (part.open) opened.add(id); else opened.delete(id); });
  return part;
}

const GOOD = new Set(["serving", "open", "fine"]);
const BAD = new Set(["fenced", "closed", "dead", "stuck", "wrong"]);
const BUSY = new Set(["stale", "holding", "mixed"]);
export const kind = (word) => (GOOD.has(word) ? "good" : BAD.has(word) ? "bad" : BUSY.has(word) ? "watch" : "");
export const pill = (word) => make("span", { class: `pill ${kind(word)}` }, word);

export const clock = (at_s) => new Date(at_s * 1000).toTimeString().slice(0, 8);
export const seconds = (value) => (value > 0 && value < 0.1 ? `${(value * 1000).toFixed(1)} ms` : value < 10 ? `${value.toFixed(2)} s` : value < 100 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`);
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB"]) { if (Math.abs(value) < 1024) return `${value.toFixed(0)} ${unit}`; value /= 1024; }
  return `${value.toFixed(1)} GiB`;
}
export const short = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(size >= 1 ? 2 : 3);
};
export const natural = (one, other) => one.localeCompare(other, undefined, { numeric: true });

const DEADLINE_MS = 15000;

// The JSON of a reply.  Throws an Error whose message is the server's reason, or that it is late.
export async function load(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, signal: AbortSignal.timeout(DEADLINE_MS) });
  } catch (error) {
    throw new Error(error.name === "TimeoutError" ? `no reply within ${DEADLINE_MS / 1000} s` : "no connection to the page's server");
  }
  const reply = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(reply.error ? reply.error.message : `HTTP ${response.status}`), { status: response.status });
  return reply;
}
