// The curves of the figures that drivers report, and of what the page computes of steps.
import { bars, curve, place } from "./charts.js";
import { find } from "./elements.js";

// Title, name and unit of each.
const REPORTED = [["Reward", "rollout/reward/mean", ""], ["Tokens per second", "rollout/tokens_per_s", ""], ["Output tokens, mean", "rollout/response_len/mean", ""], ["Request slots in use, share", "rollout/engine_busy_share", ""], ["Log-prob gap, mean", "logprob_gap/mean", " nats"]];
const LOST = ["Lost at the boundary", "lost_s", " s"];
export const RECORDED = [...REPORTED, LOST];

// Of histograms with cumulative counts: the tokens in each bucket, of all engines together.
function counts(histograms) {
  const bounds = Object.keys(histograms[0]).filter((name) => name !== "sum").sort((one, other) => Number(one.replace("+Inf", "Infinity")) - Number(other.replace("+Inf", "Infinity")));
  const up_to = bounds.map((bound) => histograms.reduce((sum, histogram) => sum + (histogram[bound] || 0), 0));
  return bounds.map((bound, index) => [bound, up_to[index] - (up_to[index - 1] || 0)]);
}

// By step, and of each the last value: a driver that was started again does steps again.
function points(figures, name) {
  const of = new Map(figures.filter((report) => name in report.metrics).map((report) => [report.step, report.metrics[name]]));
  return [...of].sort(([one], [other]) => one - other);
}

export function renderCurves({ figures, steps }) {
  const drawn = REPORTED.map(([title, name, unit]) => [title, points(figures, name), unit]);
  drawn.push([LOST[0], steps.map((step) => [step.number, step.lost_s]), LOST[2]]);
  const made = drawn.filter(([, drawn]) => drawn.length).map(([title, drawn, unit]) => curve(title, [{ name: title, points: drawn }], unit));
  const checked = figures.findLast((report) => Object.keys(report.logprob_gaps || {}).length);
  if (checked) made.push(bars(`Log-prob gap in nats, tokens of step ${checked.step}`, counts(Object.values(checked.logprob_gaps))));
  if (made.length) place(find("curves"), made);
}
