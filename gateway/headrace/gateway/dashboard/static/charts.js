// The charts: a curve over steps, versions over time, tokens by lag. Each returns {element, show(data)}.

import { h, s } from "./dom.js";
import { frame, hover, padded, place, ticks, timeTicks } from "./frame.js";
import { duration, moment, number } from "./format.js";

const HEIGHT = 210;
const ENGINES = 5;
const DOTS = 40;

/** A metric over steps: its mean, and a band from the lowest to the highest where steps are drawn together. */
export function curveChart(colour = 0) {
  return chart((data, width) => {
    const { points, metric } = data;
    if (!points.length) return null;
    const xs = [points[0].first, points[points.length - 1].last];
    const domain = xs[0] === xs[1] ? [xs[0] - 1, xs[1] + 1] : xs;
    const y = padded(Math.min(...points.map((p) => p.low)), Math.max(...points.map((p) => p.high)));
    const at = ticks(...domain, width / 90, true);
    const f = frame({ width, height: HEIGHT, x: domain, y, xLabel: "step", xTicks: { at, text: number }, label: `${metric} over steps` });
    const places = points.map((p) => ({ at: f.x((p.first + p.last) / 2), y: f.y(p.mean), point: p, text: curveText(metric, p) }));
    if (points.some((p) => p.last > p.first)) {
      const upper = places.map((c) => `${c.at},${f.y(c.point.high)}`);
      const lower = places.map((c) => `${c.at},${f.y(c.point.low)}`).reverse();
      f.svg.append(s("path", { class: `band fill-${colour}`, d: `M${[...upper, ...lower].join("L")}Z` }));
    }
    if (places.length === 1) f.svg.append(s("circle", { class: `fill-${colour}`, cx: places[0].at, cy: places[0].y, r: 3 }));
    f.svg.append(s("path", { class: `curve stroke-${colour}`, d: `M${places.map((c) => `${c.at},${c.y}`).join("L")}` }));
    hover(f.svg, places, cursor(f, colour));
    return f.svg;
  }, "No step has this metric yet.");
}

function curveText(metric, p) {
  const steps = p.first === p.last ? `step ${p.first}` : `steps ${p.first} to ${p.last}`;
  const range = p.first === p.last ? "" : `\n${number(p.low)} to ${number(p.high)}`;
  return `${steps}\n${metric} ${number(p.mean)}${range}\n${moment(p.at)}`;
}

/** Versions over time, and from when each engine served them. */
export function timelineChart() {
  const legend = h("div", { class: "legend" });
  const built = chart((data, width) => {
    legend.replaceChildren();
    const acks = data.acks.map((ack) => ({ ...ack, time: Date.parse(ack.at) }));
    let versions = data.versions.map((v) => ({ ...v, time: Date.parse(v.at) }));
    if (versions.length < 2 && !acks.length) return null;
    versions = withoutLongWait(versions);
    const times = [...versions, ...acks].map((each) => each.time);
    const low = Math.min(...versions.map((v) => v.time), ...(versions.length > 1 ? [] : times));
    const high = Math.max(...times);
    const domain = low === high ? [low - 1000, high + 1000] : [low, high + (high - low) * 0.03];
    const most = Math.max(1, ...versions.map((v) => v.version), ...acks.map((ack) => ack.version));
    const least = Math.min(...versions.map((v) => v.version));
    const y = [least - (most - least) * 0.04, most + (most - least) * 0.06 || most + 1];
    const f = frame({
      width, height: HEIGHT, x: domain, y, xLabel: "time", label: "policy versions over time",
      xTicks: timeTicks(...domain, width / 90), yTicks: ticks(...y, 4, true).filter((tick) => tick >= 0),
    });
    const items = versions.map((v) => ({ at: f.x(v.time), y: f.y(v.version), text: `version ${v.version}\ntrained ${moment(v.at)}` }));
    f.svg.append(stepLine(f, versions, "curve trained stroke-0", domain[1]));
    const legends = [["trained", 0]];
    const published = new Map(versions.map((v) => [v.version, v]));
    const engines = [...new Set(acks.map((ack) => ack.engine))];
    engines.forEach((engine, number_) => {
      const colour = 1 + Math.min(number_, ENGINES - 1);
      if (number_ < ENGINES) legends.push([number_ === ENGINES - 1 && engines.length > ENGINES ? `${engines.length - ENGINES + 1} more engines` : engine, colour]);
      const mine = acks.filter((ack) => ack.engine === engine && ack.time >= domain[0]);
      const served = mine.filter((ack) => !ack.error);
      if (served.length) f.svg.append(stepLine(f, served, `curve stroke-${colour}`, domain[1]));
      for (const ack of mine) {
        const [cx, cy] = [f.x(ack.time), f.y(ack.version)];
        if (ack.error) f.svg.append(cross(cx, cy, colour));
        else if (mine.length <= DOTS) f.svg.append(s("circle", { class: `fill-${colour}`, cx, cy, r: 2.5 }));
        const since = published.get(ack.version);
        const after = since && ack.version > 0 ? ` (${duration(since.at, ack.at)} after the step)` : "";
        items.push({ at: cx, y: cy, text: ack.error ? `${engine} failed to load version ${ack.version}\n${ack.error}` : `${engine} serves version ${ack.version}\nsince ${moment(ack.at)}${after}` });
      }
    });
    items.sort((a, b) => a.at - b.at);
    legend.append(...legends.map(([name, colour]) => h("span", {}, s("svg", {}, s("line", { class: `curve stroke-${colour}`, x1: 0, x2: 16, y1: 5, y2: 5 })), name)));
    hover(f.svg, items, cursor(f, 0));
    return f.svg;
  }, "No version yet, and no engine has said that it serves version 0.");
  return { element: h("div", {}, built.element, legend), show: built.show };
}

/** Without version 0 where the first step came so long after it that the rest would be a line at the edge. */
function withoutLongWait(versions) {
  if (versions.length < 4) return versions;
  const span = versions[versions.length - 1].time - versions[1].time;
  return versions[1].time - versions[0].time > span / 2 ? versions.slice(1) : versions;
}

function stepLine(f, events, className, until) {
  const first = events[0];
  const d = events.slice(1).map((each) => `H${f.x(each.time)}V${f.y(each.version)}`);
  return s("path", { class: className, d: `M${f.x(first.time)},${f.y(first.version)}${d.join("")}H${f.x(until)}` });
}

function cross(x, y, colour) {
  return s("path", { class: `curve stroke-${colour}`, d: `M${x - 4},${y - 4}l8,8m0,-8l-8,8` });
}

/** Tokens by lag. */
export function lagChart() {
  return chart((data, width) => {
    const bars = data.bars.filter((bar) => bar.tokens > 0);
    if (!bars.length) return null;
    const most = Math.max(...bars.map((bar) => bar.tokens));
    const all = bars.reduce((sum, bar) => sum + bar.tokens, 0);
    const centres = bars.map((_, i) => i + 0.5);
    const f = frame({
      width, height: HEIGHT, x: [0, bars.length], y: [0, most * 1.06], xLabel: "lag in versions", label: "tokens by lag",
      xTicks: { at: centres, text: (at) => bars[Math.floor(at)].lag },
    });
    const room = f.x(1) - f.x(0);
    const broad = Math.min(room * 0.7, 60);
    const items = bars.map((bar, i) => {
      const top = f.y(bar.tokens);
      const element = s("rect", { class: "bar", x: f.x(i + 0.5) - broad / 2, width: broad, y: top, height: f.inner.bottom - top, rx: 2 });
      f.svg.append(element);
      const ratio = bar.ratio === null ? "" : `\nmean ratio ${number(bar.ratio)}`;
      const ess = bar.ess === null ? "" : `\neffective share ${number(bar.ess)}`;
      const share = `${number(bar.tokens)} tokens (${((100 * bar.tokens) / all).toFixed(1)} %)`;
      return { at: f.x(i + 0.5), text: `lag ${bar.lag}\n${share}${ratio}${ess}`, element };
    });
    hover(f.svg, items, (item) => items.forEach((each) => each.element.classList.toggle("current", each === item)));
    return f.svg;
  }, "No tokens with a known lag yet.");
}

function chart(draw, empty) {
  let data = null;
  const { element, redraw } = place((width) => (data && draw(data, width)) || h("p", { class: "empty" }, data ? empty : "…"));
  return {
    element,
    show(found) {
      data = found;
      redraw();
    },
  };
}

function cursor(f, colour) {
  const line = s("line", { class: "cursor", y1: f.inner.top, y2: f.inner.bottom, visibility: "hidden" });
  const dot = s("circle", { class: `fill-${colour}`, r: 3.5, visibility: "hidden" });
  f.svg.append(line, dot);
  return (item) => {
    for (const each of [line, dot]) each.setAttribute("visibility", item ? "visible" : "hidden");
    if (!item) return;
    line.setAttribute("x1", item.at);
    line.setAttribute("x2", item.at);
    dot.setAttribute("cx", item.at);
    dot.setAttribute("cy", item.y);
  };
}
