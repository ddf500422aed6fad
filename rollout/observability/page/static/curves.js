// Small charts: one line each, with its last value as text, or the one that the pointer is over.

const SVG = "http://www.w3.org/2000/svg";
let under = null;  // the title and place under the pointer: with each change the chart is made again
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
  caption.append(value);
  const values = points.map(([, y]) => y);
  const low = Math.min(0, ...values), high = Math.max(...values) || 1;
  const first = points[0][0], end = last[0] > first ? last[0] : first + 1;
  const x = (at) => LEFT + ((at - first) / (end - first)) * (WIDTH - LEFT - 4);
  const y = (at) => 6 + (1 - (at - low) / (high - low || 1)) * (HEIGHT - BOTTOM - 6);
  const drawing = node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${points.length} points, from ${short(values[0])} to ${short(last[1])}${unit}` });
  for (const at of [low, (low + high) / 2, high]) {
    drawing.append(node("line", { x1: LEFT, x2: WIDTH, y1: y(at), y2: y(at) }), node("text", { x: LEFT - 4, y: y(at) + 3, "text-anchor": "end" }, short(at)));
  }
  drawing.append(node("text", { x: LEFT, y: HEIGHT - 2 }, String(first)), node("text", { x: WIDTH - 4, y: HEIGHT - 2, "text-anchor": "end" }, String(last[0])));
  const drawn = points.length > 300 ? points.filter((_, index) => index % Math.ceil(points.length / 300) === 0 || index === points.length - 1) : points;
  drawing.append(node("polyline", { points: drawn.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
  const mark = node("circle", { r: 2.5 });
  drawing.append(mark);
  const show = ([at, number], words) => { mark.setAttribute("cx", x(at)); mark.setAttribute("cy", y(number)); value.textContent = words; };
  const showLast = () => show(last, `${short(last[1])}${unit}`);
  const showUnder = () => {
    const near = drawn.reduce((best, one) => (Math.abs(one[0] - under.at) < Math.abs(best[0] - under.at) ? one : best));
    show(near, `${short(near[1])}${unit} at ${near[0]}`);
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect(), share = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - 4);
    under = { title, at: first + share * (end - first) };
    showUnder();
  });
  drawing.addEventListener("pointerleave", () => { under = null; showLast(); });
  if (under && under.title === title) showUnder(); else showLast();
  figure.append(caption, drawing);
  return figure;
}

// One bar for each [label, number].
export function bars(title, entries) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = title;
  const high = Math.max(1, ...entries.map(([, number]) => number)), width = (WIDTH - LEFT) / entries.length;
  const drawing = node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${entries.filter(([, number]) => number).map(([label, number]) => `up to ${label}: ${number}`).join(", ")}` });
  drawing.append(node("text", { x: LEFT - 4, y: 12, "text-anchor": "end" }, short(high)));
  entries.forEach(([label, number], index) => {
    const height = (number / high) * (HEIGHT - BOTTOM - 6), x = LEFT + index * width;
    drawing.append(node("rect", { x: x + 1, y: HEIGHT - BOTTOM - height, width: width - 2, height }));
    // Every second label, from the last: all of them would overlap.
    if ((entries.length - index) % 2) drawing.append(node("text", { x: x + width / 2, y: HEIGHT - 2, "text-anchor": "middle" }, label));
  });
  figure.append(caption, drawing);
  return figure;
}
