// What charts share: scales, ticks, axes, the note beside the pointer, and drawing anew when the width changes.

import { h, s } from "./dom.js";
import { day, number } from "./format.js";

const LEFT = 52;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 34;
const SECOND = 1000;
const DAY = 86400 * SECOND;
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200].map((n) => n * SECOND);

/** Round values between two numbers, about `count` of them. */
export function ticks(low, high, count, whole = false) {
  const span = high - low || 1;
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = power * [1, 2, 2.5, 5, 10].find((n) => n * power >= raw * 0.8);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Round moments between two, about `count`. */
export function timeTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const step = TIME_STEPS.find((n) => n >= raw) ?? Math.ceil(raw / DAY) * DAY;
  const zone = new Date(low).getTimezoneOffset() * 60 * SECOND;
  const found = [];
  for (let at = Math.ceil((low - zone) / step) * step + zone; at <= high; at += step) found.push(at);
  return { at: found, text: (time) => clock(new Date(time), step) };
}

function clock(time, step) {
  if (step >= DAY) return day(time).slice(5);
  const text = time.toLocaleTimeString("en-GB");
  return step < 60 * SECOND ? text : text.slice(0, 5);
}

/** Room above and below the values; a flat line gets some, too. */
export function padded(low, high) {
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

/**
 * Axes to draw on: {svg, width, height, x(value), y(value), inner}.
 * Options: width, height, x: [low, high], y: [low, high], xLabel, xTicks: {at, text}, yTicks, label (what the picture shows).
 */
export function frame(options) {
  const { width, height, xLabel, label } = options;
  const inner = { left: LEFT, right: width - RIGHT, top: TOP, bottom: height - BOTTOM };
  const scale = ([low, high], from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  const x = scale(options.x, inner.left, inner.right);
  const y = scale(options.y, inner.bottom, inner.top);
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, tabindex: "0" });
  for (const tick of options.yTicks ?? ticks(...options.y, 4)) {
    const at = y(tick);
    svg.append(s("line", { class: "grid-line", x1: inner.left, x2: inner.right, y1: at, y2: at }));
    svg.append(s("text", { x: inner.left - 6, y: at + 4, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of options.xTicks.at) {
    const at = x(tick);
    svg.append(s("line", { class: "axis", x1: at, x2: at, y1: inner.bottom, y2: inner.bottom + 4 }));
    svg.append(s("text", { x: at, y: inner.bottom + 16, "text-anchor": "middle" }, options.xTicks.text(tick)));
  }
  svg.append(s("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }));
  svg.append(s("text", { x: inner.right, y: height - 4, "text-anchor": "end" }, xLabel));
  return { svg, width, height, x, y, inner };
}

/** A place for a chart: calls `draw(width)` for its content, again when the width changes. Returns {element, redraw}. */
export function place(draw) {
  const element = h("div", { class: "chart" });
  let width = 0;
  const redraw = () => {
    if (width > 0) element.replaceChildren(draw(Math.round(width), element));
  };
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    redraw();
  }).observe(element);
  return { element, redraw };
}

/**
 * Values under the pointer, a finger, or the arrow keys. `items`: [{at: x in pixels, y, text}] by `at`; `mark(item | null)` shows which.
 */
export function hover(svg, items, mark) {
  let current = null;
  let tip = null;
  const show = (index) => {
    current = index;
    tip?.remove();
    tip = null;
    mark(index === null ? null : items[index]);
    if (index === null) return;
    const holder = svg.parentElement;
    tip = h("div", { class: "tip" }, items[index].text);
    holder.append(tip);
    const left = items[index].at + 12;
    const room = holder.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, left > room ? items[index].at - tip.offsetWidth - 12 : left)}px`;
    tip.style.top = `${TOP}px`;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    show(nearest(items, event.clientX - box.left, event.clientY - box.top));
  });
  svg.addEventListener("pointerleave", () => show(null));
  svg.addEventListener("blur", () => show(null));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !items.length) return;
    event.preventDefault();
    show(current === null ? items.length - 1 : Math.min(items.length - 1, Math.max(0, current + step)));
  });
}

function nearest(items, x, y) {
  let best = null;
  let distance = Infinity;
  items.forEach((item, i) => {
    const found = Math.abs(item.at - x) + (item.y === undefined ? 0 : Math.abs(item.y - y) * 0.2);
    if (found < distance) [best, distance] = [i, found];
  });
  return best;
}
