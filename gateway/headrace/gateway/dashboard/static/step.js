// One step: what it was, and the groups it trained on.

import { ask } from "./access.js";
import { facts, h, sheet, table, trail } from "./dom.js";
import { moment, number, words } from "./format.js";
import { modelLink } from "./overview.js";
import { chips } from "./trajectories.js";

/** {element, load(), concerns(change)} of a step. It never changes once it is committed, only its neighbours come. */
export function stepPage(id, step) {
  const element = h("div", {});
  const load = async () => {
    const found = await ask(`models/${encodeURIComponent(id)}/steps/${step}`);
    document.title = `step ${step} of ${found.model.name} · Headrace`;
    element.replaceChildren(
      trail(h("a", { href: "#/" }, "Models"), h("a", { href: modelLink(id) }, found.model.name), `step ${number(step)}`),
      h("section", { class: "sheet" }, h("div", { class: "row spread" }, h("h1", {}, `Step ${number(step)}`), neighbours(id, found)), known(found)),
      sheet(`Groups (${number(found.groups.length + found.more_groups)})`, groups(id, found)),
      sheet(null, measured("Metrics", found.metrics), measured("Seconds", found.timings)),
    );
  };
  return { element, load, concerns: () => false };
}

function neighbours(id, found) {
  const link = (to, text) => (to < found.first || to > found.last ? null : h("a", { href: `${modelLink(id)}/steps/${to}` }, text));
  return h("span", { class: "row" }, link(found.step.step - 1, "‹ earlier"), link(found.step.step + 1, "later ›"));
}

function known(found) {
  const { step } = found;
  return facts([
    ["version", `${number(step.step - 1)} → ${number(step.step)}`],
    ["committed", moment(step.at)],
    ["reward", number(step.reward)],
    ["loss", number(step.loss)],
    ["updates", number(step.updates)],
    ["cut by", words(step.cut)],
    ["refused before", step.refused ? number(step.refused) : null],
    ["rows kept", found.rows],
    ["job", step.job_id && h("span", { class: "mono" }, step.job_id)],
  ]);
}

function groups(id, found) {
  const rows = found.groups.map((group) => {
    const rewards = group.trajectories.map((t) => t.reward).filter((reward) => reward !== null);
    const mean = rewards.length ? `mean reward ${number(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : null;
    const address = trajectoryLink(id, found.step.step, group.group_id);
    return h(
      "div",
      { class: "group" },
      h("div", { class: "row" }, h("a", { class: "mono", href: address }, group.group_id), h("span", { class: "small" }, [`${group.trajectories.length} trajectories`, mean, group.producer && `from ${group.producer}`].filter(Boolean).join(", "))),
      chips(group.trajectories, (index) => trajectoryLink(id, found.step.step, group.group_id, index)),
    );
  });
  return [
    found.problem && h("p", { class: "note" }, found.problem),
    rows.length ? rows : h("p", { class: "empty" }, "It trained on no group."),
    found.more_groups > 0 && h("p", { class: "small" }, `And ${number(found.more_groups)} more: headrace inspect lists all.`),
  ];
}

function trajectoryLink(model, step, group, trajectory) {
  const query = new URLSearchParams({ model, step, group });
  if (trajectory !== undefined) query.set("trajectory", trajectory);
  return `/trajectory?${query}`;
}

function measured(title, values) {
  const rows = Object.entries(values).sort();
  if (!rows.length) return null;
  return h("details", {}, h("summary", {}, `${title} (${rows.length})`), facts(rows.map(([name, value]) => [name, number(value)])));
}
