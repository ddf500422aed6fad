// What is wrong and what to do, as `rollout doctor` has it; and what has happened.
import { clock, find, folded, make, pill, seconds } from "./elements.js";

const MOST_EVENTS = 80;
const FENCED = new Set(["fenced", "died"]);

let shownFindings = "";

export function renderFindings(findings, onLog) {
  const known = JSON.stringify(findings);
  if (known === shownFindings) return;
  shownFindings = known;
  find("findings").replaceChildren(...findings.map((finding, index) => {
    if (finding.severity === "fine") return make("p", { class: "quiet" }, "Nothing is wrong.");
    const logs = finding.engine_ids.slice(0, 3).map((id) => {
      const button = make("button", { class: "open", type: "button", "aria-label": `Log of ${id}, of a finding` }, `log of ${id}`);
      button.addEventListener("click", () => onLog(id));
      return button;
    });
    return make("article", { class: `finding ${finding.severity}` },
      make("p", {}, pill(finding.severity), " ", make("b", {}, finding.what)),
      finding.advice.length ? make("ol", { class: "advice", "aria-label": "What to do" }, ...finding.advice.map((line) => make("li", {}, line))) : "",
      finding.details.length ? folded(`finding ${index} ${finding.severity}`, "Why", ...finding.details.map((line) => make("p", {}, line))) : "",
      logs.length ? make("p", { class: "tools" }, ...logs) : "");
  }));
}

const end_s = (event) => event.start_s + (event.elapsed_s || 0);
const line = (event) => (event.said ? ` ${event.said.split("\n")[0]}` : "");

function item(event) {
  const hasFailed = event.outcome === "failed" || event.outcome === "cancelled";
  const isPush = event.kind === "phase" && event.name === "update_weights" && !hasFailed;
  const what = isPush ? `pushed version ${event.weight_version ?? "?"}` : `${event.engine_id || event.source} ${event.name}${hasFailed ? ` ${event.outcome}` : ""}`;
  return make("li", { class: hasFailed || FENCED.has(event.name) ? "bad" : "" }, make("time", {}, clock(end_s(event))), make("b", {}, what), isPush ? ` in ${seconds(event.elapsed_s)}` : line(event));
}

function gateItem(changes) {
  const last = changes[changes.length - 1];
  const rows = changes.slice().reverse().map((event) => make("p", {}, make("time", {}, clock(event.start_s)), line(event)));
  return make("li", { class: "gate" }, folded(`gate ${changes[0].start_s}`, `${clock(last.start_s)} gate: ${changes.length} change${changes.length > 1 ? "s" : ""}, then ${(last.said || "").split(/[: ]/)[0]}`, ...rows));
}

let shownEvents = "";

// The newest first; the changes of the gate, if they are shown, are one folded line between two other events.
export function renderEvents(events, gateEvents) {
  const last = (list) => [list.length, list.length ? list[list.length - 1].start_s : 0];
  const withGate = find("with-gate").checked;
  const known = JSON.stringify([last(events), last(gateEvents), withGate]);
  if (known === shownEvents) return;
  shownEvents = known;
  // A closed gate is trouble, which is shown in any case.
  const shown = gateEvents.filter((event) => withGate || (event.said || "").startsWith("closed"));
  const all = [...events, ...shown].sort((one, other) => end_s(one) - end_s(other));
  const items = [];
  let changes = [];
  for (const event of all) {
    if (event.name === "gate") { changes.push(event); continue; }
    if (changes.length) { items.push(gateItem(changes)); changes = []; }
    items.push(item(event));
  }
  if (changes.length) items.push(gateItem(changes));
  if (!items.length) items.push(make("li", { class: "quiet" }, "There are no events yet."));
  find("events").replaceChildren(...items.slice(-MOST_EVENTS).reverse());
}
