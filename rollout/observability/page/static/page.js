// The live page: receives the server's state, keeps it and draws it.  Values are inserted as text, never as HTML.
import { bytes, clock, find, kind, load, make, natural, seconds, text } from "./elements.js";
import { Lanes, LEGEND, Spans, colorOf, laneOf, palette } from "./lanes.js";
import { renderCurves } from "./curves.js";
import { forgetEngines, renderEngines, tickEngines } from "./engines.js";
import { openLog } from "./log.js";
import { renderEvents, renderFindings } from "./reports.js";
import { renderSamples } from "./samples.js";
import { startRuns } from "./runs.js";

const KEPT = { events: 300, gate_events: 300, figures: 500, samples: 20, steps: 100, pushes: 100 };

let state = { engines: [], running: [], events: [], gate_events: [], figures: [], samples: [], steps: [], pushes: [], findings: [] };
let offset_s = 0;
let lost_s = 0;  // when the connection broke, in this machine's time; 0 while there is one
let followed = true;
let key = "";
let shown = { from_s: 0, to_s: 0 };
const spans = new Spans();
const lanes = new Lanes(find("lanes"));

const now_s = () => (lost_s || Date.now() / 1000) + offset_s;
const FEW = 24, LATE = 16;
function pill(id, word) { text(id, word || "–"); find(id).className = `pill ${kind(word)}`; }

// -- receiving ------------------------------------------------------------------------------------

function takeState(whole) { state = { ...state, ...whole }; offset_s = whole.now_s - Date.now() / 1000; render(); }

function takeChange(change) {
  const { engines, engine_ids: ids, ...rest } = change;
  for (const name of Object.keys(KEPT)) {
    if (rest[name]) { state[name] = [...state[name], ...rest[name]].slice(-KEPT[name]); delete rest[name]; }
  }
  const before = state.phase;
  Object.assign(state, rest);
  if (change.now_s) offset_s = change.now_s - Date.now() / 1000;
  const known = new Map(state.engines.map((engine) => [engine.engine_id, engine]));
  for (const engine of engines || []) known.set(engine.engine_id, engine);
  state.engines = [...known.values()].filter((engine) => !ids || ids.includes(engine.engine_id));
  if (state.phase !== before) text("announcement", `The server is now ${state.phase}.`);
  render();
}

function connect() {
  const source = new EventSource("api/changes");
  const link = find("link");
  source.addEventListener("hello", (event) => {
    const hello = JSON.parse(event.data);
    state.run_id = hello.run_id;
    text("report", `as a file: rollout report ${hello.folder}`);
    find("control").hidden = !hello.can_steer || key !== "";
  });
  source.addEventListener("state", (event) => { lost_s = 0; document.body.classList.remove("gone"); link.className = "live"; text("link", "live"); spans.lanes.clear(); spans.ranks.clear(); spans.num = 0; takeState(JSON.parse(event.data)); });
  source.addEventListener("change", (event) => takeChange(JSON.parse(event.data)));
  source.addEventListener("spans", (event) => { spans.add(JSON.parse(event.data)); draw(); });
  source.onerror = () => { lost_s ||= Date.now() / 1000; document.body.classList.add("gone"); link.className = "lost"; tellLost(); showTitle(); };
}

// What is shown stays as it was then, so its clocks stand still too.
function tellLost() {
  if (lost_s) text("link", `no connection; last heard ${seconds(Date.now() / 1000 - lost_s)} ago, at ${clock(lost_s + offset_s)}`);
}

// -- drawing --------------------------------------------------------------------------------------

function render() {
  showTitle();
  text("server", `${state.server || "rollout"}${state.run_id ? ` · ${state.run_id}` : ""}`);
  const gate = state.gate || {}, router = state.router || {};
  pill("phase", state.phase); pill("gate", gate.state);
  find("gate").title = gate.reason || "";
  const adapters = Object.entries(gate.adapters || {}).filter(([name]) => name);
  find("adapters-fact").hidden = !adapters.length;
  text("adapters", adapters.map(([name, held]) => `${name} ${held.slice(held.lastIndexOf("@") + 1)}`).join(", "));
  text("version", state.weight_version ?? "–"); text("held", gate.num_held ?? 0);
  text("in-flight", router.num_in_flight ?? 0); text("owner", state.lock_owner || "none");
  const serving = state.engines.filter((engine) => engine.state === "serving").length;
  text("num-engines", serving === state.engines.length ? serving : `${serving} of ${state.engines.length} serve`);
  const trouble = find("trouble");
  trouble.hidden = !state.trouble;
  text("trouble", state.is_answering === false ? `The server does not answer: ${state.trouble}. The page shows its last reply.` : state.trouble || "");
  renderRunning(); showEngines(); renderSteps(); renderPushes(); renderFindings(state.findings, openLog); renderEvents(state.events, state.gate_events); renderCurves(state); renderSamples(state.samples);
}

// A tab in the background shows trouble too.
function showTitle() {
  const worst = lost_s ? "gone" : (state.findings[0] || {}).severity;
  const trouble = worst === "gone" || worst === "stuck" || worst === "wrong" ? worst.toUpperCase() : "";
  document.title = `${trouble && `${trouble} · `}${state.server || "rollout"}: ${state.phase || "…"}`;
  const icon = trouble ? "icon-trouble.svg" : "icon.svg";
  if (find("icon").getAttribute("href") !== icon) find("icon").setAttribute("href", icon);
}

function renderRunning() {
  const box = find("running");
  const phases = state.running.filter((span) => span.kind === "phase");
  const top = phases.length ? phases : state.running.filter((span) => span.kind === "group");
  if (!top.length) {
    box.replaceChildren(make("p", { class: "quiet" }, "No phase runs."));
    return;
  }
  box.replaceChildren(...top.map((phase) => {
    const late = state.running.filter((span) => span.kind === "engine" && span.start_s >= phase.start_s - 0.05);
    const names = late.map((span) => span.engine_id);
    const calls = state.running.filter((span) => span.kind === "call" && names.includes(span.engine_id));
    const waiting = !names.length ? "no engine has an open request"
      : `waits for ${names.length} of ${state.engines.length}: ${names.slice(0, 6).join(", ")}${names.length > 6 ? " …" : ""}${calls.length ? ` (${calls[0].name})` : ""}`;
    const line = make("div", { class: "phase" },
      make("b", {}, `${phase.kind === "group" ? `${phase.source}: ` : ""}${phase.name}`),
      make("div", { class: "deadline" }, make("i")),
      make("span", { class: "clock" }),
      make("span", { class: "who" }, waiting));
    line.dataset.start = phase.start_s; line.dataset.budget = phase.budget_s || 0;
    return line;
  }));
  tick();
}

function tick() {
  for (const line of document.querySelectorAll(".phase")) {
    const elapsed_s = Math.max(0, now_s() - Number(line.dataset.start)), budget_s = Number(line.dataset.budget);
    const share = budget_s ? Math.min(1, elapsed_s / budget_s) : 0;
    line.querySelector(".clock").textContent = budget_s ? `${seconds(elapsed_s)} of ${seconds(budget_s)}` : seconds(elapsed_s);
    const bar = line.querySelector(".deadline");
    bar.className = `deadline ${share > 0.5 ? "bad" : share > 0.2 ? "watch" : ""}`;
    bar.firstChild.style.width = `${share * 100}%`;
  }
  tickEngines(now_s());
}

function showEngines() {
  const onFence = (id) => command(`api/fence/${id}`, `Fence ${id}? It is killed now, and recovery restarts it.`);
  renderEngines(state.engines, { canFence: key !== "", onFence, onLog: openLog });
  tick();
}

// A row that is there stays: with it would go the focus of the keyboard.
function renderSteps() {
  const body = find("steps"), steps = state.steps.slice(-50).reverse(), colors = palette();
  steps.forEach((step, index) => {
    const known = JSON.stringify([step.number, step.end_s, colors]);
    if (body.children[index]?.dataset.known === known) return;
    const row = stepRow(step, colors);
    row.dataset.known = known;
    body.insertBefore(row, body.children[index] || null);
  });
  while (body.children.length > steps.length) body.lastChild.remove();
}

function stepRow(step, colors) {
  const share = make("div", { class: "share" });
  const parts = Object.entries(step.phase_s);
  const all = parts.reduce((sum, [, elapsed_s]) => sum + elapsed_s, 0) || 1;
  for (const [name, took] of parts) {
    const bar = make("i", { title: `${name}: ${seconds(took)}` });
    bar.style.width = `${(took / all) * 100}%`; bar.style.background = colorOf(colors, name);
    share.append(bar);
  }
  const longest = parts.sort((one, other) => other[1] - one[1])[0];
  const slowest = longest && step.slowest[longest[0]];
  const open = make("button", { class: "open", type: "button", "aria-label": `Open step ${step.number}` }, `${step.number}`);
  open.addEventListener("click", () => openStep(step.number));
  return make("tr", {},
    make("th", { scope: "row" }, open, ` ${clock(step.end_s)}`),
    make("td", { class: "num" }, String(step.weight_version ?? "–")),
    make("td", { class: "num" }, seconds(step.lost_s)),
    make("td", { class: "num" }, seconds(step.paused_s)),
    make("td", { class: "num" }, seconds(step.trainer_s)),
    make("td", {}, share),
    make("td", {}, slowest ? `${slowest.engine_id} in ${longest[0]}` : "", step.failures.length ? make("span", { class: "pill bad" }, `${step.failures.length} failed`) : ""));
}

function renderPushes() {
  find("pushes").hidden = !state.pushes.length;
  find("push-rows").replaceChildren(...state.pushes.slice(-50).reverse().map((push) => make("tr", {},
    ...[[String(push.weight_version), true], [push.route], [bytes(push.num_bytes), true], [push.density === null ? "whole tensors" : `${(push.density * 100).toPrecision(3)} %`, true],
      [seconds(push.elapsed_s), true], [seconds(push.paused_s), true]].map(([cell, isNumber]) => make("td", isNumber ? { class: "num" } : {}, cell)))));
}

async function openStep(number) {
  const dialog = find("step"), body = find("step-body");
  text("step-title", `Step ${number}`);
  body.replaceChildren(make("p", { class: "quiet" }, "Loading…"));
  dialog.showModal();
  let step;
  try {
    step = await load(`api/steps/${number}`);
  } catch (error) {
    body.replaceChildren(make("p", {}, error.status === 404 ? "The page no longer has this step; rollout trace shows it." : error.message));
    return;
  }
  const canvas = make("canvas", { role: "img", "aria-label": "Engines in this step; the table below shows its longest calls" });
  const drawn = new Spans(); drawn.add(step.spans.filter((span) => span.kind !== "call").sort((one, other) => one.start_s + one.elapsed_s - other.start_s - other.elapsed_s));
  const ids = [...new Set(step.spans.map(laneOf).filter(Boolean))].sort(natural);
  const calls = step.spans.filter((span) => span.kind === "call" || span.outcome === "failed").sort((one, other) => other.elapsed_s - one.elapsed_s).slice(0, 40);
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...["Engine", "Call", "Seconds", "Sent", "Outcome"].map((title) => make("th", { scope: "col" }, title)))),
    make("tbody", {}, ...calls.map((call) => make("tr", {}, make("td", {}, call.engine_id || ""), make("td", {}, call.name), make("td", {}, seconds(call.elapsed_s)), make("td", {}, call.num_bytes ? bytes(call.num_bytes) : ""), make("td", { class: call.outcome === "ok" ? "" : "error" }, call.outcome === "ok" ? "ok" : call.said || call.outcome)))));
  body.replaceChildren(make("p", {}, `Weight version ${step.weight_version}; ${seconds(step.lost_s)} lost at the boundary, ${seconds(step.paused_s)} paused for the push, ${seconds(step.trainer_s)} for the trainer.`), canvas, make("div", { class: "scroll", tabindex: "0" }, table));
  const margin = (step.end_s - step.start_s) * 0.02;
  new Lanes(canvas).draw({ lanes: ids, spans: drawn, running: [], from_s: step.start_s - margin, to_s: step.end_s + margin });
}

// -- control: needs the key, which is kept in this tab and sent as a header, never as a cookie -------

function confirm(title, question, needsKey) {
  const dialog = find("ask");
  text("ask-title", title); text("ask-text", question);
  find("ask-key").hidden = !needsKey; find("key").value = "";
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => { dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }); });
}

async function command(path, question) {
  if (!(await confirm("Are you sure?", question, false))) return;
  try {
    await load(path, { method: "POST", headers: { authorization: `Bearer ${key}` } });
    text("announcement", "done");
  } catch (error) {
    if (error.status === 403) { key = ""; showControls(); }
    text("announcement", error.message);
    await confirm(error.status ? "The server refused the command" : "The server did not reply", error.message, false);
  }
}

function showControls() {
  find("control").hidden = key !== ""; find("stop").hidden = key === "";
  forgetEngines(); showEngines();
}

find("control").addEventListener("click", async () => {
  if (await confirm("Control this server", "With the page's control key you can fence engines and stop the server.", true)) { key = find("key").value; showControls(); }
});
find("stop").addEventListener("click", () => command("api/stop", `Stop ${state.server} with its router and all its engines?`));

// -- lanes ----------------------------------------------------------------------------------------

function draw() {
  const span = Number(find("span").value);
  if (followed) {
    // A run that has just begun fills the width as well.
    const end = now_s() + span * 0.02;
    shown = { from_s: Math.max(end - span, Math.min(spans.first - span * 0.02, end - 10)), to_s: end };
  }
  // Of many engines, the few that a phase waits for come first; further down they would be out of sight.
  const all = state.engines.map((engine) => engine.engine_id);
  const late = new Set(state.running.filter((span) => span.kind === "engine").map((span) => span.engine_id));
  const ids = all.length > FEW && late.size <= LATE ? [...all.filter((id) => late.has(id)), ...all.filter((id) => !late.has(id))] : all;
  const running = state.running.map((span) => ({ ...span, elapsed_s: Math.max(0, now_s() - span.start_s) }));
  const rollouts = state.figures.filter((report) => "rollout/seconds" in report.metrics)
    .map((report) => ({ kind: "rollout", name: "rollout", step: report.step, start_s: report.at_s - report.metrics["rollout/seconds"], elapsed_s: report.metrics["rollout/seconds"], outcome: "ok" }));
  lanes.draw({ lanes: [...ids, ...[...spans.ranks].sort(natural)], spans, running, rollouts, ...shown });
}

function follow(is) { followed = is; find("follow").setAttribute("aria-pressed", String(is)); draw(); }
function move(share) { const span = shown.to_s - shown.from_s; followed = false; shown = { from_s: shown.from_s + share * span, to_s: shown.to_s + share * span }; follow(share > 0 && shown.to_s >= now_s()); }
function zoom(factor) { const middle = (shown.from_s + shown.to_s) / 2, half = ((shown.to_s - shown.from_s) / 2) * factor; shown = { from_s: middle - half, to_s: middle + half }; follow(false); }

find("lanes").addEventListener("keydown", (event) => {
  const acts = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), Home: () => follow(true) };
  if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
});
find("lanes").addEventListener("pointermove", (event) => {
  const tip = find("tip"), under = lanes.at(event.clientX, event.clientY);
  tip.hidden = !under || !under.span;
  if (tip.hidden) return;
  const { span, lane } = under;
  const more = [span.num_bytes ? `${span.kind === "rank" ? "" : "sent "}${bytes(span.num_bytes)}` : "", span.read_bytes ? `read ${bytes(span.read_bytes)}` : "", span.memory_before_bytes !== undefined ? `memory ${bytes(span.memory_before_bytes)} → ${bytes(span.memory_after_bytes)}` : "", span.weight_version !== undefined ? `version ${span.weight_version}` : "", span.outcome === "ok" ? "" : span.outcome, span.said || ""].filter(Boolean);
  tip.textContent = `${lane}: ${span.name}, ${seconds(span.elapsed_s)}, ${clock(span.start_s)}${more.length ? `\n${more.join("; ")}` : ""}`;
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 320)}px`; tip.style.top = `${event.clientY + 16}px`;
});
find("lanes").addEventListener("pointerleave", () => { find("tip").hidden = true; });
find("span").addEventListener("change", () => follow(true));
find("follow").addEventListener("click", () => follow(!followed));
find("with-gate").addEventListener("change", () => renderEvents(state.events, state.gate_events));
find("samples-step").addEventListener("change", () => renderSamples(state.samples));
find("filter").addEventListener("input", showEngines);
find("only-others").addEventListener("change", showEngines);
find("close").addEventListener("click", () => find("step").close());
window.addEventListener("resize", () => { draw(); renderCurves(state); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { legend(); renderSteps(); draw(); });

function legend() {
  const colors = palette();
  find("legend").replaceChildren(...LEGEND.map((name) => { const box = make("i"); box.style.background = colors[name]; return make("span", {}, box, name.replace("_weights", "")); }));
}

legend();
connect();
startRuns();
setInterval(() => { tick(); tellLost(); if (followed && !document.hidden) draw(); }, 250);
