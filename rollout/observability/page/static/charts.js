// Small charts of the page and of ``rollout report``.  An SVG is as wide as its place and its units are pixels, so text has one size.
// Each line has its last value as text, or the one that the pointer is over.
import { make, short } from "./elements.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 120, LEFT = 40, RIGHT = 6, TOP = 8, BOTTOM = 16;
const MOST_POINTS = 300;
let under = null;  // the chart and place under the pointer: with each change the chart is made again

function node(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function thinned(points) {
  const every = Math.ceil(points.length / MOST_POINTS);
  return points.filter((_, index) => index % every === 0 || index === points.length - 1);
}

// A chart of lines { name, points: [[x, y], …] }, all over the same x.
export function curve(title, lines, unit = "") {
  const key = `${title} ${lines.length}`;
  const values = lines.map((_, index) => make("b", { class: `line-${index}` }));
  const caption = make("figcaption", {}, make("span", { class: "title" }, `${title} `), ...values.map((value, index) => (lines.length > 1 ? make("span", { class: "entry" }, make("span", { class: "name", title: lines[index].name }, lines[index].name), " ", value) : value)));
  const all = lines.flatMap((line) => line.points.map(([, y]) => y)), places = lines.flatMap((line) => line.points.map(([x]) => x));
  const low = Math.min(0, ...all), high = Math.max(...all) > low ? Math.max(...all) : low + 1;
  const first = Math.min(...places), end = Math.max(...places) > first ? Math.max(...places) : first + 1;
  const last = (line) => line.points[line.points.length - 1];
  const label = lines.map((line) => `${lines.length > 1 ? `${line.name} ` : ""}${line.points.length} points, from ${short(line.points[0][1])} to ${short(last(line)[1])}${unit}`).join("; ");
  const drawing = node("svg", { height: HEIGHT, role: "img", "aria-label": `${title}: ${label}` });
  const figure = make("figure", {}, caption, drawing);
  figure.draw = (width) => {
    const x = (at) => LEFT + ((at - first) / (end - first)) * (width - LEFT - RIGHT);
    const y = (at) => TOP + (1 - (at - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
    drawing.replaceChildren();
    for (const at of [low, (low + high) / 2, high]) {
      drawing.append(node("line", { x1: LEFT, x2: width, y1: y(at), y2: y(at) }), node("text", { x: LEFT - 4, y: y(at) + 3, "text-anchor": "end" }, short(at)));
    }
    drawing.append(node("text", { x: LEFT, y: HEIGHT - 3 }, String(first)), node("text", { x: width - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, String(Math.max(...places))));
    const drawn = lines.map((line) => thinned(line.points));
    const marks = lines.map((_, index) => node("circle", { r: 2.5, class: `line-${index}` }));
    drawn.forEach((points, index) => drawing.append(node("polyline", { class: `line-${index}`, points: points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }), marks[index]));
    const show = (index, [at, number], words) => { marks[index].setAttribute("cx", x(at)); marks[index].setAttribute("cy", y(number)); values[index].textContent = words; };
    const showLast = () => lines.forEach((line, index) => show(index, last(line), `${short(last(line)[1])}${unit}`));
    const showUnder = () => drawn.forEach((points, index) => {
      const near = points.reduce((best, one) => (Math.abs(one[0] - under.at) < Math.abs(best[0] - under.at) ? one : best));
      show(index, near, `${short(near[1])}${unit} at ${near[0]}`);
    });
    drawing.onpointermove = (event) => {
      const share = (event.clientX - drawing.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT);
      under = { key, at: first + share * (end - first) };
      showUnder();
    };
    drawing.onpointerleave = () => { under = null; showLast(); };
    if (under && under.key === key) showUnder(); else showLast();
  };
  return figure;
}

// One bar for each [label, number].
export function bars(title, entries) {
  const drawing = node("svg", { height: HEIGHT, role: "img", "aria-label": `${title}: ${entries.filter(([, number]) => number).map(([label, number]) => `up to ${label}: ${number}`).join(", ")}` });
  const figure = make("figure", {}, make("figcaption", {}, title), drawing);
  figure.draw = (width) => {
    const high = Math.max(1, ...entries.map(([, number]) => number)), wide = (width - LEFT) / entries.length;
    drawing.replaceChildren(node("text", { x: LEFT - 4, y: 12, "text-anchor": "end" }, short(high)));
    const every = Math.ceil(38 / wide);  // as many labels as have room
    entries.forEach(([label, number], index) => {
      const height = (number / high) * (HEIGHT - BOTTOM - TOP), x = LEFT + index * wide;
      drawing.append(node("rect", { x: x + 1, y: HEIGHT - BOTTOM - height, width: Math.max(1, wide - 2), height }));
      if ((entries.length - 1 - index) % every === 0) drawing.append(node("text", { x: index === entries.length - 1 ? width - 2 : x + wide / 2, y: HEIGHT - 3, "text-anchor": index === entries.length - 1 ? "end" : "middle" }, label));
    });
  };
  return figure;
}

// Shows charts in an element; their width is known only there.
export function place(box, figures) {
  box.replaceChildren(...figures);
  for (const figure of figures) figure.draw(figure.querySelector("svg").clientWidth || 300);
}
