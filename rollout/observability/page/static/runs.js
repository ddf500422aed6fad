// The servers of this run and of the other runs in its folder, side by side, and two runs' curves over one another.
import { curve, place } from "./charts.js";
import { RECORDED } from "./curves.js";
import { clock, find, load, make, pill, short, text } from "./elements.js";

const EVERY_MS = 5000;
let runs = [], own = { run_id: "", server: "" }, compared = [];

export function startRuns() {
  find("compare").addEventListener("change", compare);
  window.addEventListener("resize", drawComparison);
  refresh();
}

async function refresh() {
  if (!document.hidden) {
    try {
      const reply = await load("api/runs");
      runs = reply.runs;
      text("runs-trouble", "");
    } catch (error) {
      text("runs-trouble", `The list is not up to date: ${error.message}`);
    }
    render();
  }
  setTimeout(refresh, EVERY_MS);
}

function render() {
  const servers = runs.flatMap((run) => run.servers.map((server) => ({ run, ...server })));
  find("runs").hidden = servers.length < 2;
  const here = servers.find((server) => server.is_here);
  if (here) own = { run_id: here.run.run_id, server: here.server };
  find("run-rows").replaceChildren(...servers.map(row));
  const others = runs.filter((run) => run.run_id !== own.run_id && run.servers.some((server) => server.is_recorded)).map((run) => run.run_id);
  const select = find("compare"), known = [...select.options].slice(1).map((option) => option.value);
  if (JSON.stringify(others) !== JSON.stringify(known)) {
    const chosen = select.value;
    select.replaceChildren(make("option", { value: "" }, "no run"), ...others.map((id) => make("option", { value: id }, id)));
    select.value = others.includes(chosen) ? chosen : "";
  }
  find("compare-label").hidden = !others.length;
}

function row({ run, server, url, is_here: isHere, summary, trouble }) {
  const name = isHere || !url ? make("span", {}, server) : make("a", { href: url }, server);
  const cells = summary
    ? [pill(summary.phase), summary.weight_version ?? "–", `${summary.num_serving} of ${summary.num_engines}`, summary.num_in_flight, summary.step ?? "–", short(summary.reward), summary.severity === "fine" ? "" : summary.finding]
    : ["–", "–", "–", "–", "–", "–", trouble];
  const classes = ["", "num", "num", "num", "num", "num", summary && summary.severity !== "fine" ? "error" : "quiet"];
  return make("tr", { class: isHere ? "here" : "" },
    make("th", { scope: "row", title: `launched ${new Date(run.began_s * 1000).toLocaleDateString()} ${clock(run.began_s)}` }, run.run_id),
    make("td", {}, name, isHere ? make("span", { class: "quiet" }, " (this page)") : ""),
    ...cells.map((cell, index) => make("td", { class: classes[index], title: index === 6 ? String(cell) : undefined }, cell instanceof Node ? cell : String(cell))));
}

async function compare() {
  const other = find("compare").value;
  compared = [];
  text("compare-note", "");
  if (other) {
    const path = (id) => `api/runs/${encodeURIComponent(id)}/curves?server=${encodeURIComponent(own.server)}`;
    text("compare-note", "Loading…");
    try {
      const loaded = await Promise.all([load(path(own.run_id)), load(path(other))]);
      if (find("compare").value !== other) return;
      compared = loaded;
      text("compare-note", "");
    } catch (error) {
      text("compare-note", `These runs cannot be compared: ${error.message}`);
    }
  }
  drawComparison();
}

function drawComparison() {
  const figures = RECORDED.map(([title, name, unit]) => [title, compared.filter((one) => one.curves[name]).map((one) => ({ name: one.run_id, points: one.curves[name] })), unit])
    .filter(([, lines]) => lines.length).map(([title, lines, unit]) => curve(title, lines, unit));
  const box = find("comparison");
  box.hidden = !compared.length;
  if (compared.length && !figures.length) text("compare-note", "Neither run has recorded a figure.");
  place(box, figures);
}
