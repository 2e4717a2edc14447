// A map of experts: a row for each layer, where each lies, and how much it was wanted lately.

import { byId, make, say } from "./dom.js";
import { counted, grouped } from "./units.js";

const LARGEST_PX = 18; // of a cell
const LOWEST_PX = 5;
const GAP_FROM_PX = 5; // smaller cells touch

const PLACES = {
  g: ["on the GPU", "gpu"],
  m: ["in memory", "memory"],
  c: ["in memory while there is room", "memory"],
  d: ["on the disk", "drive"],
};

const box = byId("heat");
const canvas = byId("heat-map");
const words = byId("heat-text");
let experts = null;
let shape = null; // {width, height, columns, rows} of cells, in CSS pixels
let cursor = null; // {row, column}, by mouse or keyboard

export function startExperts() {
  new ResizeObserver(paint).observe(box);
  window.addEventListener("themechange", paint);
  box.addEventListener("pointermove", (event) => {
    const at = shape && cellAt(event);
    if (at) point(at);
  });
  box.addEventListener("pointerleave", () => point(null));
  box.addEventListener("blur", () => point(null));
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const move = moves[event.key];
    if (!move || !shape) return;
    event.preventDefault();
    const from = cursor ?? { row: -Math.min(0, move[0]) - move[0], column: -Math.min(0, move[1]) - move[1] };
    point({
      row: Math.min(shape.rows - 1, Math.max(0, from.row + move[0])),
      column: Math.min(shape.columns - 1, Math.max(0, from.column + move[1])),
    });
  });
}

export function showExperts(seen) {
  byId("experts").hidden = seen === null;
  if (!seen) return;
  const kinds = [...new Set(seen.places.join(""))].map((letter) => PLACES[letter][1]);
  showLegend(["gpu", "memory", "drive"].filter((kind) => kinds.includes(kind)));
  experts = seen;
  paint();
}

function showLegend(kinds) {
  const legend = byId("heat-legend");
  if (legend.dataset.kinds === kinds.join()) return;
  legend.dataset.kinds = kinds.join();
  const names = { gpu: "on the GPU", memory: "in memory", drive: "on the disk" };
  legend.replaceChildren(
    ...kinds.map((kind) => make("li", {}, make("i", { class: `part of-${kind}` }), names[kind])),
    make("li", { class: "quiet" }, make("i", { class: "ramp" }), "stronger: wanted more lately"),
  );
}

function cellAt(event) {
  const bounds = canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - bounds.left) / shape.width);
  const row = Math.floor((event.clientY - bounds.top) / shape.height);
  const inside = row >= 0 && row < shape.rows && column >= 0 && column < shape.columns;
  return inside ? { row, column } : null;
}

function point(at) {
  if (cursor === at || (cursor && at && cursor.row === at.row && cursor.column === at.column)) return;
  cursor = at;
  paint();
}

function paint() {
  if (!experts || !box.clientWidth) return;
  const style = getComputedStyle(box);
  const rows = experts.layers.length;
  const columns = Math.max(...experts.places.map((row) => row.length));
  const width = Math.min(LARGEST_PX, box.clientWidth / columns);
  const height = Math.min(LARGEST_PX, Math.max(LOWEST_PX, width));
  shape = { width, height, columns, rows };
  const scale = window.devicePixelRatio || 1;
  canvas.style.width = `${width * columns}px`;
  canvas.style.height = `${height * rows}px`;
  canvas.width = Math.round(width * columns * scale);
  canvas.height = Math.round(height * rows * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const colours = Object.fromEntries(
    ["gpu", "memory", "drive"].map((kind) => [kind, style.getPropertyValue(`--heat-${kind}`)]),
  );
  const gap = width >= GAP_FROM_PX && height >= GAP_FROM_PX ? 1.5 : 0;
  experts.places.forEach((places, row) => {
    for (let column = 0; column < places.length; column += 1) {
      const kind = PLACES[places[column]][1];
      const heat = (experts.heat[row]?.[column] ?? 0) / 100;
      const cold = kind === "drive" ? 0.14 : 0.3;
      context.globalAlpha = cold + (1 - cold) * Math.sqrt(Math.min(1, heat * 1.5));
      context.fillStyle = colours[kind];
      context.beginPath();
      context.roundRect(column * width, row * height, width - gap, height - gap, gap ? 2.5 : 0);
      context.fill();
    }
  });
  if (cursor) {
    context.globalAlpha = 1;
    context.strokeStyle = style.getPropertyValue("--ink");
    context.lineWidth = 1.5;
    const [x, y] = [cursor.column * width, cursor.row * height];
    context.strokeRect(x + 0.75, y + 0.75, Math.max(2, width - gap - 1.5), Math.max(2, height - gap - 1.5));
  }
  say(words, cursor ? about(cursor) : overview());
}

function about({ row, column }) {
  const [where] = PLACES[experts.places[row][column]] ?? ["not there"];
  const heat = experts.heat[row]?.[column];
  const wanted = heat === undefined ? "how often it is needed is not counted here" : `needed in ${heat}% of the last steps`;
  return `Layer ${experts.layers[row]}, expert ${column}: ${where}; ${wanted}.`;
}

/** Nothing that changes by itself: it is read aloud. */
function overview() {
  const each = experts.places[0].length;
  return `${counted(experts.layers.length, "layer")} of ${grouped(each)} experts. A row is a layer.`;
}
