// The page of one trajectory: what was said, and what each token counted for.

import { ask } from "./access.js";
import { facts, h, sheet, trail } from "./dom.js";
import { number } from "./format.js";
import { legend, scaleOf, tokenText } from "./tokens.js";
import { chips } from "./trajectories.js";

const query = new URLSearchParams(location.search);

function link(changes) {
  const next = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) next.set(name, value);
  return `/trajectory?${next}`;
}

async function open() {
  const page = document.getElementById("page");
  const [model, step, group] = ["model", "step", "group"].map((name) => query.get(name));
  if (!model || !step || !group) {
    page.replaceChildren(h("p", { class: "empty" }, "This page needs a model, a step and a group: ", h("a", { href: "/" }, "choose a model"), ", then a step, then a trajectory."));
    return;
  }
  const asked = new URLSearchParams({ group });
  for (const name of ["trajectory", "update"]) if (query.has(name)) asked.set(name, query.get(name));
  try {
    page.replaceChildren(...shown(await ask(`models/${encodeURIComponent(model)}/steps/${encodeURIComponent(step)}/trajectory?${asked}`)));
  } catch (error) {
    page.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message), h("p", {}, h("a", { href: "/" }, "To the models")));
  }
}

function shown(found) {
  const modelLink = `/#/models/${encodeURIComponent(found.model.id)}`;
  const me = found.siblings.find((t) => t.index === found.index);
  const scale = scaleOf(found.sequences);
  document.title = `${found.group_id} #${found.index} · Headrace`;
  return [
    trail(h("a", { href: "/" }, "Models"), h("a", { href: modelLink }, found.model.name), h("a", { href: `${modelLink}/steps/${found.step}` }, `step ${number(found.step)}`), found.group_id, `#${found.index}`),
    h(
      "section",
      { class: "sheet" },
      h("h1", {}, `Trajectory ${found.index} of ${found.group_id}`),
      facts([
        ["reward", me && number(me.reward)],
        ["advantage", me && number(me.advantage)],
        ["sampled by version", me && versions(me.versions)],
        ["tokens", me && me.tokens !== null ? `${number(me.tokens)}, ${number(me.trainable_tokens)} trained` : null],
        ["producer", found.producer],
        ["offset in the log", number(found.offset)],
        ...Object.entries(found.metrics).map(([name, value]) => [name, typeof value === "number" ? number(value) : String(value)]),
      ]),
      chips(found.siblings, (trajectory) => link({ trajectory }), found.index),
    ),
    found.notes.map((note) => h("p", { class: "note" }, note)),
    updates(found),
    ...found.histories.map((history, i) => sheet(i ? `History ${i + 1}` : "Conversation", i ? null : legend(scale), tools(history.tools), history.messages.map((message) => messageBlock(message, found.sequences, scale)))),
    ...whole(found, scale),
    extras(found),
  ].flat().filter(Boolean);
}

function versions([first, last]) {
  if (first === null && last === null) return "unknown";
  return first === last || last === null || first === null ? number(first ?? last) : `${number(first)} to ${number(last)}`;
}

function updates(found) {
  if (found.updates.length < 2) return null;
  return h("p", { class: "row" }, "Update ", found.updates.map((update) => (update === found.update ? h("strong", {}, update) : h("a", { href: link({ update }) }, update))), h("span", { class: "small" }, "the step trained on it more than once"));
}

function messageBlock(message, sequences, scale) {
  const said = [message.role, message.name, message.call_id && `answers ${message.call_id}`, message.finish_reason && `ended by ${message.finish_reason}`].filter(Boolean).join(" · ");
  const span = message.span;
  const body = span ? tokenText(sequences[span.sequence], span.start, span.stop, scale) : message.text && h("div", { class: "text" }, message.text);
  return h(
    "article",
    { class: `message ${message.role}` },
    h("div", { class: "role" }, said),
    message.reasoning && h("details", {}, h("summary", {}, "reasoning"), h("div", { class: "text" }, message.reasoning)),
    body,
    message.calls.map((call) => h("div", { class: "call" }, h("div", { class: "role" }, ["calls ", h("strong", {}, call.name), call.id && ` · ${call.id}`]), h("pre", {}, call.arguments))),
  );
}

function tools(text) {
  return text && h("details", {}, h("summary", {}, "tools"), h("pre", {}, text));
}

/** The sequences as they were trained: drawn when they are opened, or at once where a turn could not be placed in them. */
function whole(found, scale) {
  const placed = found.histories.every((history) => history.messages.every((message) => !message.sampled || message.span));
  return found.sequences.map((tokens) => {
    const summary = h("summary", {}, `Token sequence${found.sequences.length > 1 ? ` ${tokens.part + 1}` : ""} as it was trained, context included (${number(tokens.ids.length)} tokens, row ${tokens.row})`);
    const details = h("details", {}, summary);
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(tokenText(tokens, 0, tokens.ids.length, scale));
    });
    details.open = !placed || !found.histories.length;
    return sheet(null, found.histories.length ? null : legend(scale), details);
  });
}

function extras(found) {
  const parts = [];
  if (Object.keys(found.metadata).length) parts.push(h("details", {}, h("summary", {}, "metadata"), h("pre", {}, JSON.stringify(found.metadata, null, 2))));
  if (found.logs.length) parts.push(h("details", {}, h("summary", {}, `logs (${found.logs.length})`), h("pre", {}, found.logs.join("\n"))));
  return parts.length ? sheet(null, parts) : null;
}

open();
