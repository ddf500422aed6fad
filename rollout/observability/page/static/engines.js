// The table of engines: a row is made again only if something in it has changed.
import { bytes, clock, find, folded, kind, make, pill, seconds, short } from "./elements.js";

const rows = new Map();

const sum = (gpus, name) => gpus.reduce((total, gpu) => total + gpu[name], 0);

function gpuMemory(engine) {
  if (!engine.num_gpus) return "–";
  return engine.gpus.length ? `${bytes(sum(engine.gpus, "used_bytes"))} of ${bytes(sum(engine.gpus, "total_bytes"))}` : "not measured";
}

// The mean of those GPUs that the driver measures.
function gpuUse(engine) {
  const measured = engine.gpus.filter((gpu) => gpu.busy_percent !== null);
  return measured.length ? `${(sum(measured, "busy_percent") / measured.length).toFixed(0)} %` : "–";
}

// Since the last push.
const draftsRight = ({ drafts }) => (!drafts || drafts.share === null ? "–" : `${(100 * drafts.share).toFixed(0)} %`);

function row(engine, error, { canFence, onFence, onLog }) {
  const doing = make("td", { class: "doing" });
  if (engine.doing) { doing.dataset.start = engine.doing.start_s; doing.dataset.name = engine.calling ? engine.calling.name : engine.doing.name; }
  const log = make("button", { class: "open", type: "button", "aria-label": `Log of ${engine.engine_id}` }, "log");
  log.addEventListener("click", () => onLog(engine.engine_id));
  const name = make("th", { scope: "row", title: `${engine.url}, node ${engine.node_id}, pid ${engine.pid ?? "unknown"}` }, engine.engine_id, " ", log);
  if (canFence && engine.state !== "fenced") {
    const fence = make("button", { class: "open", type: "button", "aria-label": `Fence ${engine.engine_id}` }, "fence");
    fence.addEventListener("click", () => onFence(engine.engine_id));
    name.append(" ", fence);
  }
  const number = (value, more = "") => make("td", { class: `num ${more}` }, value);
  return make("tr", {},
    name,
    make("td", {}, pill(engine.state), engine.standby ? ` standby: ${engine.standby}` : ""),
    number(String(engine.weight_version ?? "–")),
    number(String(engine.num_in_flight)),
    number(String(engine.num_waiting ?? "–")),
    number(short(engine.tokens_per_s)),
    number(draftsRight(engine), "draft"),
    number(bytes(engine.resident_bytes)),
    number(gpuMemory(engine), "gpu"),
    number(gpuUse(engine), "gpu"),
    doing,
    make("td", { class: "error" }, error ? folded(`error ${engine.engine_id}`, error.split("\n")[0].slice(0, 60), error) : ""));
}

export function forgetEngines() { rows.clear(); find("rows").replaceChildren(); }

export function renderEngines(engines, options) {
  const wanted = find("filter").value.trim().toLowerCase(), onlyOthers = find("only-others").checked;
  const body = find("rows"), seen = new Set();
  for (const engine of engines) {
    const error = engine.fence_reason || engine.reason || (engine.last_error ? `${clock(engine.last_error.at_s)} ${engine.last_error.name}: ${engine.last_error.said}` : "");
    const isHidden = (onlyOthers && engine.state === "serving") || (wanted && !`${engine.engine_id} ${engine.state} ${error} ${engine.group}`.toLowerCase().includes(wanted));
    if (isHidden) continue;
    seen.add(engine.engine_id);
    const known = JSON.stringify([engine.state, engine.standby, engine.weight_version, engine.num_in_flight, engine.num_waiting, engine.tokens_per_s, engine.drafts, engine.resident_bytes, engine.gpus, engine.doing, error]);
    const old = rows.get(engine.engine_id);
    if (old && old.known === known) continue;
    const made = row(engine, error, options);
    if (old) old.row.replaceWith(made); else body.append(made);
    rows.set(engine.engine_id, { known, row: made });
  }
  for (const [id, { row: gone }] of rows) if (!seen.has(id)) { gone.remove(); rows.delete(id); }
  // Without a GPU or a draft, their columns would be empty.
  find("engine-table").classList.toggle("no-gpu", !engines.some((engine) => engine.num_gpus));
  find("engine-table").classList.toggle("no-draft", !engines.some((engine) => engine.drafts));
  const tiles = find("tiles");
  tiles.hidden = engines.length <= 16;
  if (!tiles.hidden) tiles.replaceChildren(...engines.map((engine) => make("i", { class: kind(engine.state) || (engine.doing ? "watch" : ""), title: `${engine.engine_id}: ${engine.state}` })));
}

// The clocks of what engines do now.
export function tickEngines(now_s) {
  for (const cell of document.querySelectorAll("td.doing[data-start]")) {
    cell.textContent = `${cell.dataset.name} · ${seconds(Math.max(0, now_s - Number(cell.dataset.start)))}`;
  }
}
