// The timeline as a drawing: bands of layouts, switches below them, then tokens per second and requests.
// In a plot the first line is filled, the second one is not. Prompts have a plot of their own, beside which no output
// would be seen.

import { clock, count, layoutName, minutes, percent, plural, short } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 44;
const RIGHT = 10;
const BAND = { top: 4, height: 26 };
const MARKS = { top: 33, height: 5 };
const PLOTS = [
  { title: "output tokens/s", top: 62, height: 66, lines: ["output_tokens"], fold: mean },
  { title: "prompt and output tokens/s", top: 154, height: 40, lines: ["tokens"], fold: mean },
  { title: "requests", top: 220, height: 56, lines: ["running", "waiting"], fold: (values) => Math.max(...values) },
];
const HEIGHT = 302;
const BOTTOM = PLOTS[2].top + PLOTS[2].height;
const LABEL_PX = 34;
const TICKS_S = [15, 30, 60, 120, 300, 600];
export const LINES = {
  running: "requests running",
  waiting: "requests queued",
};
export const LAYOUTS = { tp: "tensor parallel", dp: "data parallel", cp: "context parallel", dop: "decoupled ownership" };

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A pattern for each layout, for eyes that cannot tell the colours. `id` keeps the drawings of a page apart. */
export function patterns(id) {
  const marks = {
    tp: [],
    dp: [svg("path", { d: "M-2 2 L2 -2 M0 8 L8 0 M6 10 L10 6", class: "mark" })],
    cp: [svg("circle", { cx: 2, cy: 2, r: 1.2, class: "dot" }), svg("circle", { cx: 6, cy: 6, r: 1.2, class: "dot" })],
    dop: [svg("path", { d: "M0 0 L8 8 M8 0 L0 8", class: "mark" })],
  };
  const make = ([name, drawn]) =>
    svg("pattern", { id: `${id}-${name}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 8, height: 8, class: `fill-${name}` }), ...drawn);
  return svg("defs", {}, ...Object.entries(marks).map(make));
}

const paint = (id, layout) => (layout in LAYOUTS ? `url(#${id}-${layout})` : "none");

/** The key to a layout or a line of the chart. */
export function swatch(name) {
  const node = svg("svg", { width: 26, height: 14, "aria-hidden": "true" });
  if (name in LAYOUTS) {
    node.append(patterns(`key-${name}`), svg("rect", { width: 26, height: 14, rx: 2, fill: paint(`key-${name}`, name) }));
  } else {
    const isFilled = PLOTS.some((plot) => plot.lines[0] === name);
    if (isFilled) node.append(svg("path", { d: "M1 4 H25 V14 H1 Z", class: "area" }));
    node.append(svg("path", { d: isFilled ? "M1 4 H25" : "M1 7 H25", class: `line line-${name}` }));
  }
  return node;
}

/** The chart of the last `length` seconds, `width` pixels wide. */
export function draw(timeline, length, width) {
  const to = timeline.next;
  const from = to - length;
  const x = (second) => LEFT + ((second - from) / length) * (width - LEFT - RIGHT);
  const root = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
  root.append(patterns("band"));
  const spans = timeline.spans(from, to);
  root.append(...bands(spans, x), ...switchMarks(spans, x));
  for (const plot of PLOTS) root.append(...drawPlot(timeline, plot, { from, to, x, width, spans }));
  root.append(...timeTicks(timeline, { from, to, x, width }));
  return root;
}

function bands(spans, x) {
  const merged = [];
  for (const span of spans) {
    const last = merged.at(-1);
    if (last && last.layout === span.layout) last.to = span.to;
    else merged.push({ ...span });
  }
  const nodes = [];
  for (const { from, to, layout } of merged) {
    const width = Math.max(1, x(to) - x(from));
    nodes.push(svg("rect", { x: x(from), y: BAND.top, width, height: BAND.height, fill: paint("band", layout), class: "band" }));
    if (width > LABEL_PX && layout) {
      const middle = x(from) + width / 2;
      nodes.push(
        svg("rect", { x: middle - 16, y: BAND.top + 4, width: 32, height: BAND.height - 8, rx: 3, class: `fill-${layout}` }),
        svg("text", { x: middle, y: BAND.top + 18, class: "band-name" }, layoutName(layout)),
      );
    }
  }
  return nodes;
}

function switchMarks(spans, x) {
  return spans
    .filter((span) => span.switch !== "steady")
    .map(({ from, to }) =>
      svg("rect", { x: x(from), y: MARKS.top, width: Math.max(2, x(to) - x(from)), height: MARKS.height, class: "under-way" }));
}

/** Values of several seconds folded into one, so that a line has no more points than pixels to show them. */
function fold(values, from, size, how) {
  const points = [];
  for (let index = 0; index < values.length; index += size) {
    const part = values.slice(index, index + size).filter((value) => value !== null);
    if (part.length) points.push([from + index + part.length / 2, how(part)]);
  }
  return points;
}

function drawPlot(timeline, plot, { from, to, x, width, spans }) {
  const size = Math.max(1, Math.ceil((to - from) / (width / 3)));
  const begin = Math.floor(from / size) * size; // so that the same seconds stay together while time goes on
  const lines = plot.lines.map((name) => [name, fold(timeline.slice(name, begin, to), begin, size, plot.fold)]);
  const most = niceMost(Math.max(1, ...lines.flatMap(([, points]) => points.map(([, value]) => value))));
  const bottom = plot.top + plot.height;
  const y = (value) => bottom - (value / most) * plot.height;
  const nodes = spans
    .filter(({ layout }) => layout)
    .map((span) =>
      svg("rect", { x: x(span.from), y: plot.top, width: x(span.to) - x(span.from), height: plot.height, class: `tint fill-${span.layout}` }));
  for (const value of plot.height < 50 ? [0, most] : [0, most / 2, most]) {
    nodes.push(svg("path", { d: `M${LEFT} ${y(value)} H${width - RIGHT}`, class: "grid" }));
    nodes.push(svg("text", { x: LEFT - 6, y: y(value) + 4, class: "axis left" }, short(value)));
  }
  nodes.push(svg("text", { x: LEFT, y: plot.top - 8, class: "axis" }, plot.title));
  lines.forEach(([name, points], index) => {
    if (!points.length) return;
    const at = points.map(([second, value]) => [Math.max(LEFT, x(second)).toFixed(1), y(value).toFixed(1)]);
    const path = `M${at.map((point) => point.join(" ")).join(" L")}`;
    if (index === 0) nodes.push(svg("path", { d: `${path} V${bottom} H${at[0][0]} Z`, class: "area" }));
    nodes.push(svg("path", { d: path, class: `line line-${name}` }));
  });
  return nodes;
}

function niceMost(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return Math.max(2, [1, 2, 4, 6, 8, 10].find((step) => step * power >= value) * power);
}

function timeTicks(timeline, { from, to, x, width }) {
  const fits = Math.max(2, Math.floor((width - LEFT - RIGHT) / 80));
  const step = TICKS_S.find((seconds) => (to - from) / seconds <= fits) ?? TICKS_S.at(-1);
  const nodes = [];
  const say = step < 60 ? clock : minutes;
  for (let time = Math.ceil((from + timeline.begins) / step) * step; time <= to + timeline.begins; time += step) {
    const at = x(time - timeline.begins);
    nodes.push(svg("path", { d: `M${at} ${BOTTOM} v5`, class: "grid" }));
    const hasRoom = at > LEFT - 10 && at < width - RIGHT - 20;
    if (hasRoom) nodes.push(svg("text", { x: at, y: HEIGHT - 8, class: "axis middle" }, say(time)));
  }
  return nodes;
}

function shares(timeline, from, to) {
  const held = new Map();
  let all = 0;
  for (const span of timeline.spans(from, to)) {
    all += span.to - span.from;
    held.set(span.layout, (held.get(span.layout) ?? 0) + span.to - span.from);
  }
  return [...held].filter(([layout]) => layout).map(([layout, time]) => `${layoutName(layout)} ${percent(time / all)}`);
}

function known(timeline, name, from, to) {
  return timeline.slice(name, from, to).filter((value) => value !== null);
}

/** What the chart shows, in words. */
export function describe(timeline, length) {
  const to = timeline.next;
  const from = to - length;
  const tokens = known(timeline, "tokens", from, to);
  if (!tokens.length) return "No full second has passed yet.";
  const num = timeline.recent.filter((one) => one.began_s >= from).length;
  const layouts = shares(timeline, from, to).join(", ") || "no layout yet";
  const output = known(timeline, "output_tokens", from, to);
  const most = Math.max(...known(timeline, "running", from, to));
  const seen = tokens.length < length ? `${plural(tokens.length, "second")} so far` : `Last ${Math.round(length / 60)} minutes`;
  return (
    `${seen}: ${layouts}; ${num ? plural(num, "switch").replace("switchs", "switches") : "no switch"}; at most ` +
    `${plural(most, "request")} running; ${count(mean(output))} output tokens/s on average, ${count(Math.max(...output))} at most.`
  );
}

/** Ten rows with the same. */
export function rows(timeline, length) {
  const size = length / 10;
  const end = timeline.next;
  const made = [];
  for (let from = end - length; from < end; from += size) {
    const tokens = known(timeline, "tokens", from, from + size);
    if (!tokens.length) continue;
    made.push([
      clock(Math.max(from, timeline.first) + timeline.begins),
      shares(timeline, from, from + size).join(", "),
      count(Math.max(...known(timeline, "running", from, from + size))),
      count(Math.max(...known(timeline, "waiting", from, from + size))),
      count(mean(tokens)),
      count(mean(known(timeline, "output_tokens", from, from + size))),
    ]);
  }
  return made;
}
