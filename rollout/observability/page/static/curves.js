// Small charts: one line each, with its last value as text.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 120, LEFT = 34, BOTTOM = 14;

function node(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

export const short = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(size >= 1 ? 2 : 3);
};

export function curve(title, points, unit = "") {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const last = points[points.length - 1];
  caption.append(`${title} `);
  const value = document.createElement("b");
  value.textContent = `${short(last[1])}${unit}`;
  caption.append(value);
  const values = points.map(([, y]) => y);
  const low = Math.min(0, ...values), high = Math.max(...values) || 1;
  const first = points[0][0], end = last[0] > first ? last[0] : first + 1;
  const x = (at) => LEFT + ((at - first) / (end - first)) * (WIDTH - LEFT - 4);
  const y = (at) => 6 + (1 - (at - low) / (high - low || 1)) * (HEIGHT - BOTTOM - 6);
  const drawing = node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${points.length} points, from ${short(values[0])} to ${short(last[1])}${unit}` });
  for (const at of [low, (low + high) / 2, high]) {
    drawing.append(node("line", { x1: LEFT, x2: WIDTH, y1: y(at), y2: y(at) }), node("text", { x: LEFT - 4, y: y(at) + 3, "text-anchor": "end" }, short(at)));
  }
  drawing.append(node("text", { x: LEFT, y: HEIGHT - 2 }, String(first)), node("text", { x: WIDTH - 4, y: HEIGHT - 2, "text-anchor": "end" }, String(last[0])));
  const drawn = points.length > 300 ? points.filter((_, index) => index % Math.ceil(points.length / 300) === 0 || index === points.length - 1) : points;
  drawing.append(node("polyline", { points: drawn.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
  figure.append(caption, drawing);
  return figure;
}
