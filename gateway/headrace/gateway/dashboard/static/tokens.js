// Tokens coloured by advantage × ratio: blue was made likelier, orange less likely, and the stronger the more it counted.

import { h } from "./dom.js";
import { number } from "./format.js";

const STRONGEST = 0.75;

/** The value that stands for full colour: the 98th percentile of |advantage × ratio|, so that one outlier does not make the rest pale. */
export function scaleOf(sequences) {
  const sizes = sequences.flatMap((t) => t.ids.map((_, i) => worth(t, i))).filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.ceil(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] : 0;
}

/** Advantage × ratio of a token; null where it was not trained. */
export function worth(tokens, i) {
  const [advantage, ratio] = [tokens.advantages[i], tokens.ratios[i]];
  return advantage === null || ratio === null ? null : advantage * ratio;
}

/** What the colours mean. */
export function legend(scale) {
  if (!scale) return null;
  return h("div", { class: "scale" }, h("span", {}, "advantage × ratio"), h("span", {}, number(-scale)), h("span", { class: "ramp" }), h("span", {}, `+${number(scale)}`), h("span", {}, "grey: context, not trained"));
}

/** Tokens `start` to `stop` of a sequence; values show under the pointer, at a tap, and by the arrow keys. */
export function tokenText(tokens, start, stop, scale) {
  const element = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys show their values" });
  const spans = [];
  for (let i = start; i < stop; i += 1) {
    const span = h("span", { class: tokens.trained[i] ? "token" : "token context", "data-at": i }, shownText(tokens, i));
    const value = worth(tokens, i);
    if (value !== null && scale) {
      const strength = Math.min(1, Math.abs(value) / scale) * STRONGEST;
      span.style.backgroundColor = `rgba(var(--${value > 0 ? "up" : "down"}), ${strength.toFixed(3)})`;
    }
    spans.push(span);
    element.append(span);
  }
  follow(element, spans, (i) => values(tokens, start + i));
  return element;
}

function shownText(tokens, i) {
  const text = tokens.texts?.[i];
  if (text === undefined || text === null) return `⟨${tokens.ids[i]}⟩`;
  return text.replace(/\n/g, "↵\n");
}

function values(tokens, i) {
  const text = tokens.texts?.[i];
  const rows = [
    ["token", text === undefined || text === null ? null : JSON.stringify(text)],
    ["id", tokens.ids[i]],
    ["position", i],
  ];
  if (tokens.trained[i]) {
    rows.push(
      ["advantage × ratio", number(worth(tokens, i))],
      ["advantage", number(tokens.advantages[i])],
      ["ratio", number(tokens.ratios[i])],
      ["log-probability old", number(tokens.old[i])],
      ["log-probability new", number(tokens.new[i])],
      ["sampler's", number(tokens.behaviour[i])],
      ["weight", number(tokens.weights[i])],
      ["lag", number(tokens.lags[i])],
    );
  } else rows.push(["", "context: not trained"]);
  return rows.filter(([, value]) => value !== null).map(([name, value]) => (name ? `${name} ${value}` : value)).join("\n");
}

let tip = null;
let marked = null;

function showTip(span, text) {
  tip?.remove();
  marked?.classList.remove("current");
  [tip, marked] = [null, span];
  if (!span) return;
  span.classList.add("current");
  tip = h("div", { class: "tip fixed", role: "status" }, text);
  document.body.append(tip);
  const box = span.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 4))}px`;
  const below = box.bottom + 6;
  tip.style.top = `${below + tip.offsetHeight > window.innerHeight ? Math.max(4, box.top - tip.offsetHeight - 6) : below}px`;
}

function follow(element, spans, text) {
  let current = 0;
  const show = (span) => {
    current = spans.indexOf(span);
    showTip(span, text(current));
  };
  const under = (event) => event.target.closest?.(".token");
  element.addEventListener("pointerover", (event) => under(event) && show(under(event)));
  element.addEventListener("click", (event) => under(event) && show(under(event)));
  element.addEventListener("pointerleave", () => showTip(null));
  element.addEventListener("blur", () => showTip(null));
  element.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") showTip(null);
    if (!step || !spans.length) return;
    event.preventDefault();
    show(spans[Math.min(spans.length - 1, Math.max(0, marked && spans[current] === marked ? current + step : 0))]);
  });
}
