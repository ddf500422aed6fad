// Lanes over time on a canvas: one for the server's phases, one per engine and per rank of the trainer.
// Only visible spans are drawn, and of several within one pixel only the first: 256 lanes stay fast.

const COLORS = {
  pause_generation: "--pause", flush_cache: "--flush", release_memory_occupation: "--release", onload_weights: "--onload",
  update_weights: "--update", begin_weight_update: "--update", end_weight_update: "--update",
  verify: "--verify", onload_kv: "--kv", continue_generation: "--continue", restart: "--watch", readmit: "--watch",
  gather: "--gather", copy: "--copy", engine: "--engine", rollout: "--rollout", trainer: "--trainer",
};
export const LEGEND = ["rollout", "trainer", "pause_generation", "flush_cache", "release_memory_occupation", "onload_weights", "update_weights", "verify", "onload_kv", "continue_generation", "gather", "copy", "engine"];
const AXIS = 22;
const SERVER_LANE = 22;

export const laneOf = (span) => (span.kind === "phase" ? "" : span.rank !== undefined ? `rank ${span.rank}` : span.engine_id || "");

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function palette() {
  const found = { ink: style("--ink"), soft: style("--soft"), line: style("--line"), bad: style("--bad"), card: style("--card") };
  for (const [name, variable] of Object.entries(COLORS)) found[name] = style(variable);
  found.other = style("--other");
  return found;
}

export const colorOf = (colors, name) => colors[name] || colors.other;

// Spans by lane, in the order of their ends; the oldest are dropped.
export class Spans {
  constructor(max = 60000) { this.lanes = new Map(); this.ranks = new Set(); this.max = max; this.num = 0; this.first = Infinity; }

  add(spans) {
    for (const span of spans) {
      if (span.kind === "phase" || (span.kind === "group" && !span.engine_id)) { if (span.kind === "group") continue; }
      const lane = laneOf(span);
      if (span.kind === "rank") this.ranks.add(lane);
      if (!this.lanes.has(lane)) this.lanes.set(lane, []);
      this.lanes.get(lane).push(span);
      this.first = Math.min(this.first, span.start_s);
      this.num += 1;
    }
    while (this.num > this.max) {
      for (const lane of this.lanes.values()) {
        const gone = lane.splice(0, Math.max(1, Math.ceil(lane.length / 10)));
        this.num -= gone.length;
      }
    }
  }

  in(lane, from_s, to_s) {
    const all = this.lanes.get(lane) || [];
    const found = [];
    for (let index = all.length - 1; index >= 0; index -= 1) {
      const span = all[index];
      if (span.start_s + span.elapsed_s < from_s - 1) { if (index < all.length - 400) break; continue; }
      if (span.start_s <= to_s && span.start_s + span.elapsed_s >= from_s) found.push(span);
    }
    return found;
  }
}

export function laneHeight(num) { return num <= 24 ? 20 : num <= 64 ? 11 : num <= 128 ? 7 : 4; }

export class Lanes {
  constructor(canvas) { this.canvas = canvas; this.hits = []; this.lanes = []; }

  draw({ lanes, spans, running, rollouts = [], from_s, to_s }) {
    const { canvas } = this;
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth || 800;
    const height = laneHeight(lanes.length);
    const label = height >= 11 ? 108 : 76;
    const total = AXIS + SERVER_LANE + 6 + lanes.length * height + 6;
    canvas.style.height = `${total}px`;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(total * scale)) {
      canvas.width = Math.round(width * scale); canvas.height = Math.round(total * scale);
    }
    const pen = canvas.getContext("2d");
    const colors = palette();
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, total);
    pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    const x = (at) => label + ((at - from_s) / (to_s - from_s)) * (width - label - 8);
    this.frame = { label, height, width, from_s, to_s, top: AXIS + SERVER_LANE + 6 };
    this.lanes = lanes; this.spans = spans; this.running = running;
    this.bands = [...rollouts, ...this.trainerBands()];
    for (const band of this.bands) this.band(pen, colors, x, total, band);
    this.axis(pen, colors, x, total);
    this.lane(pen, colors, x, "server", AXIS + 2, SERVER_LANE - 4, [...spans.in("", from_s, to_s), ...running.filter((span) => span.kind === "phase")], true);
    const byEngine = new Map();
    for (const span of running) if (span.kind === "engine") byEngine.set(span.engine_id, [...(byEngine.get(span.engine_id) || []), span]);
    lanes.forEach((lane, index) => {
      const top = this.frame.top + index * height;
      if (height >= 11 ? index % 2 : Math.floor(index / 16) % 2) { pen.globalAlpha = 0.35; pen.fillStyle = colors.line; pen.fillRect(label, top, width - label - 8, height); pen.globalAlpha = 1; }
      const named = height >= 11 || index % 16 === 0;
      this.lane(pen, colors, x, named ? lane : "", top + (height > 6 ? 1 : 0), height - (height > 6 ? 2 : 1), [...spans.in(lane, from_s, to_s), ...(byEngine.get(lane) || [])], height >= 18);
    });
    if (!lanes.length) { pen.fillStyle = colors.soft; pen.fillText("no engine yet", label + 8, this.frame.top + 8); }
  }

  // Rollouts as drivers have reported them, and the times of the trainer: whole on the server's lane, pale over the others.
  band(pen, colors, x, total, { name, step, start_s, elapsed_s }) {
    const { from_s, to_s } = this.frame;
    const begin = Math.max(start_s, from_s), end = Math.min(start_s + elapsed_s, to_s);
    if (end <= begin) return;
    const left = x(begin), wide = Math.max(1, x(end) - left);
    pen.fillStyle = colorOf(colors, name);
    pen.globalAlpha = 0.25; pen.fillRect(left, AXIS, wide, total - AXIS);
    pen.globalAlpha = 1; pen.fillRect(left, AXIS + 2, wide, SERVER_LANE - 4);
    const label = step === undefined ? name : `${name} ${step}`;
    if (wide > pen.measureText(label).width + 10) { pen.fillStyle = colors.ink; pen.fillText(label, left + 5, AXIS + SERVER_LANE / 2); }
  }

  // The trainer has the memory from the end of a release to the next phase.
  trainerBands() {
    const { from_s, to_s } = this.frame;
    const phases = [...this.spans.in("", from_s - 3600, to_s), ...this.running.filter((span) => span.kind === "phase")]
      .filter((span) => span.kind !== "event").sort((one, other) => one.start_s - other.start_s);
    return phases.flatMap((phase, index) => {
      if (phase.name !== "release_memory_occupation" || phase.outcome === "running") return [];
      const begin = phase.start_s + phase.elapsed_s, end = phases[index + 1] ? phases[index + 1].start_s : to_s;
      return end > begin ? [{ kind: "trainer", name: "trainer", start_s: begin, elapsed_s: end - begin, outcome: "ok" }] : [];
    });
  }

  axis(pen, colors, x, total) {
    const { from_s, to_s } = this.frame;
    const span = to_s - from_s;
    const most = Math.max(1, Math.min(9, (this.frame.width - this.frame.label) / 75));  // as many times as have room
    const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600].find((size) => span / size <= most) || 7200;
    pen.strokeStyle = colors.line; pen.fillStyle = colors.soft; pen.lineWidth = 1;
    for (let at = Math.ceil(from_s / step) * step; at <= to_s; at += step) {
      pen.beginPath(); pen.moveTo(x(at), AXIS - 4); pen.lineTo(x(at), total); pen.stroke();
      const clock = new Date(at * 1000).toTimeString().slice(0, 8) + (step < 1 ? `.${Math.round((at % 1) * 10)}` : "");
      if (x(at) + 3 + pen.measureText(clock).width <= this.frame.width) pen.fillText(clock, x(at) + 3, AXIS / 2);
    }
  }

  lane(pen, colors, x, name, top, height, spans, hasText) {
    const { label, from_s, to_s, width } = this.frame;
    if (name) { pen.fillStyle = colors.soft; pen.fillText(name.length > 15 ? `${name.slice(0, 14)}…` : name, 6, top + height / 2); }
    pen.save(); pen.beginPath(); pen.rect(label, top - 1, width - label - 8, height + 2); pen.clip();
    let last = -1, lastColor = "";
    for (const span of spans) {
      if (span.kind === "call" || span.kind === "group") continue;
      const color = span.outcome === "failed" || span.outcome === "cancelled" ? colors.bad : colorOf(colors, span.name);
      if (span.kind === "event") {
        if (span.name === "gate") continue;
        pen.fillStyle = colors.bad; pen.beginPath(); pen.arc(x(span.start_s), top + height / 2, Math.max(2, height / 4), 0, 7); pen.fill();
        continue;
      }
      const left = x(Math.max(span.start_s, from_s)), right = x(Math.min(span.start_s + span.elapsed_s, to_s));
      const wide = Math.max(1, right - left);
      if (wide <= 1 && Math.round(left) === last && lastColor === color) continue;
      last = Math.round(left); lastColor = color;
      pen.fillStyle = color; pen.globalAlpha = span.outcome === "running" ? 0.55 : 1;
      pen.fillRect(left, top, wide, height);
      pen.globalAlpha = 1;
      if (hasText && wide > 46) { pen.fillStyle = colors.card; pen.fillText(span.name.replace(/_(generation|cache|memory_occupation|weights)$/, ""), left + 4, top + height / 2 + 0.5); }
    }
    pen.restore();
  }

  // The span under a point, for the tooltip; null outside the lanes.
  at(clientX, clientY) {
    if (!this.frame) return null;
    const box = this.canvas.getBoundingClientRect();
    const { label, top, height, width, from_s, to_s } = this.frame;
    const across = clientX - box.left, down = clientY - box.top;
    if (across < label) return null;
    const at_s = from_s + ((across - label) / (width - label - 8)) * (to_s - from_s);
    const near_s = (to_s - from_s) / (width - label) * 2;
    const index = Math.floor((down - top) / height);
    const lane = down < top ? "" : this.lanes[index];
    if (lane === undefined) return null;
    const running = this.running.filter((span) => (lane ? span.kind === "engine" && span.engine_id === lane : span.kind === "phase"));
    const found = [...this.spans.in(lane, from_s, to_s), ...running].filter((span) => span.start_s - near_s <= at_s && span.start_s + span.elapsed_s + near_s >= at_s && span.kind !== "call");
    if (!lane) found.push(...this.bands.filter((band) => band.start_s <= at_s && band.start_s + band.elapsed_s >= at_s));
    found.sort((one, other) => one.elapsed_s - other.elapsed_s);
    return { lane: lane || "server", at_s, span: found[0] || null };
  }
}
