// One model: its curves, its versions over time, what was refused, its steps.

import { ask } from "./access.js";
import { curveChart, lagChart, timelineChart } from "./charts.js";
import { facts, h, sheet, table, trail } from "./dom.js";
import { moment, number, total, words } from "./format.js";
import { jobTable, modelLink, status } from "./overview.js";

const PAGE = 25;
const OTHER = ["kl_behaviour", "grad_norm", "ratio_mean"];

/** {element, load(), concerns(change)} of a model. */
export function modelPage(id) {
  const path = `models/${encodeURIComponent(id)}`;
  const head = h("div", {});
  const [reward, loss, other] = [curveChart(0), curveChart(1), curveChart(2)];
  const [timeline, lags] = [timelineChart(), lagChart()];
  const [lagTitle, refused, steps, jobs] = [h("h2", {}, "Lag"), h("div", {}), h("div", {}), h("div", {})];
  const select = h("select", { "aria-label": "Metric", onchange: () => drawOther() });
  let shown = PAGE;
  const curve = (metric) => ask(`${path}/curves/${encodeURIComponent(metric)}`);
  const drawOther = async () => {
    if (select.value) other.show(await curve(select.value));
  };
  const loadSteps = async () => {
    const found = await ask(`${path}/steps?limit=${shown}`);
    const more = h("button", { onclick: () => { shown = Math.min(shown * 4, 500); loadSteps(); } }, "More steps");
    steps.replaceChildren(found.steps.length ? stepTable(id, found.steps) : h("p", { class: "empty" }, "No step yet."), found.more && shown < 500 ? more : "");
  };
  const element = h(
    "div",
    {},
    head,
    h("div", { class: "grid" },
      sheet("Reward", reward.element),
      sheet("Loss", loss.element),
      sheet("Policy versions", timeline.element),
      h("section", { class: "sheet" }, lagTitle, lags.element),
      h("section", { class: "sheet" }, h("h2", {}, select), other.element),
      sheet("Refused", refused)),
    sheet("Steps", steps),
    jobs,
  );
  const load = async () => {
    const [found, rewards, losses] = await Promise.all([ask(path), curve("reward_mean"), curve("loss")]);
    showHead(head, found.model);
    reward.show(rewards);
    loss.show(losses);
    timeline.show(found.timeline);
    lags.show(found.lags);
    lagTitle.textContent = found.lags.steps ? `Lag, tokens of the last ${found.lags.steps} steps` : "Lag";
    refused.replaceChildren(...refusals(found));
    jobs.replaceChildren(found.jobs.length ? sheet("Jobs", jobTable(found.jobs, load, false)) : "");
    showNames(select, found.metrics);
    await Promise.all([drawOther(), loadSteps()]);
  };
  return { element, load, concerns: (change) => change.all || change.models.includes(id) };
}

function showHead(head, m) {
  document.title = `${m.name} · Headrace`;
  head.replaceChildren(
    trail(h("a", { href: "#/" }, "Models"), m.name),
    h("section", { class: "sheet" },
      h("h1", {}, m.name),
      facts([
        ["project", m.project],
        ["status", status(m)],
        ["version", number(m.version)],
        ["base model", `${m.base_model} (${m.adaptation})`],
        ["groups trained", number(m.trained)],
        ["groups waiting", number(m.waiting)],
        ["created", moment(m.created_at)],
        ["changed", moment(m.updated_at)],
        ["shadow of", m.shadow_of],
        ["id", h("span", { class: "mono" }, m.id)],
      ])),
  );
}

function showNames(select, names) {
  if (select.options.length === names.length) return;
  const chosen = select.value || OTHER.find((name) => names.includes(name)) || names[0] || "";
  select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  select.value = chosen;
  select.hidden = !names.length;
}

function refusals(found) {
  const { refusals: groups, trajectory_refusals: trajectories } = found.model;
  if (!total(groups) && !total(trajectories)) return [h("p", { class: "empty" }, "Nothing was refused.")];
  const most = Math.max(...Object.values(groups), ...Object.values(trajectories));
  const bars = (counts, kind) => Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([reason, count]) => {
    const bar = h("span", { class: "measure" });
    bar.style.width = `${(100 * count) / most}%`;
    return h("div", { class: kind }, h("span", {}, words(reason), kind && h("span", { class: "small" }, " (one trajectory)")), bar, h("span", {}, number(count)));
  });
  const latest = found.refused.map((one) => h("li", {}, h("span", { class: "mono" }, one.group_id), ` ${words(one.reason)}: ${one.detail} `, h("span", { class: "small" }, moment(one.at))));
  return [
    h("div", { class: "reasons" }, bars(groups, null), bars(trajectories, "of-trajectories")),
    latest.length ? h("details", {}, h("summary", {}, `the latest ${latest.length}`), h("ul", {}, latest)) : "",
  ];
}

function stepTable(id, rows) {
  return table(
    [
      { label: "step", cell: (r) => h("a", { href: `${modelLink(id)}/steps/${r.step}` }, number(r.step)) },
      { label: "committed", minor: true, cell: (r) => moment(r.at) },
      { label: "reward", number: true, cell: (r) => number(r.reward) },
      { label: "loss", number: true, cell: (r) => number(r.loss) },
      { label: "groups", number: true, cell: (r) => number(r.groups) },
      { label: "updates", number: true, minor: true, cell: (r) => number(r.updates) },
      { label: "refused before", number: true, minor: true, cell: (r) => (r.refused ? number(r.refused) : null) },
      { label: "cut by", minor: true, cell: (r) => words(r.cut) },
      { label: "job", minor: true, cell: (r) => r.job_id && h("span", { class: "mono" }, r.job_id) },
    ],
    rows,
    true,
  );
}
