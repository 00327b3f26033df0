// The first page: models and jobs.

import { ask } from "./access.js";
import { h, sheet, table } from "./dom.js";
import { duration, jobState, moment, number, stateClass, total } from "./format.js";

/** {element, load(), concerns(change)} of the first page. */
export function overviewPage() {
  const element = h("div", {});
  const load = async () => {
    const found = await ask("overview");
    const parts = [
      sheet("Models", found.models.length ? modelTable(found.models) : empty("No model yet: ", "headrace models create")),
      found.more_models && h("p", { class: "small" }, `Only the ${found.models.length} that changed last are listed.`),
      sheet("Jobs", found.jobs.length ? jobTable(found.jobs, load) : empty("No job yet. A stream of groups needs none.")),
      found.more_jobs && h("p", { class: "small" }, `Only the ${found.jobs.length} that changed last are listed.`),
    ];
    element.replaceChildren(...parts.filter(Boolean));
  };
  return { element, load, concerns: () => true };
}

function empty(text, command) {
  return h("p", { class: "empty" }, text, command && h("code", {}, command));
}

function modelTable(models) {
  return table(
    [
      { label: "model", cell: (m) => [h("a", { href: modelLink(m.id) }, m.name), " ", h("span", { class: "small" }, m.project)] },
      { label: "status", cell: (m) => status(m) },
      { label: "version", number: true, cell: (m) => number(m.version) },
      { label: "reward", number: true, cell: (m) => number(m.reward) },
      { label: "loss", number: true, cell: (m) => number(m.loss) },
      { label: "trained", number: true, cell: (m) => number(m.trained) },
      { label: "waiting", number: true, cell: (m) => number(m.waiting) },
      { label: "refused", cell: (m) => refusals(m.refusals) },
      { label: "engines", cell: (m) => engines(m.engines) },
      { label: "changed", cell: (m) => moment(m.updated_at) },
    ],
    models,
  );
}

/** A model's status, with its reason. */
export function status(m) {
  return [h("span", { class: stateClass(m.status) }, m.status), m.detail && h("div", { class: "small" }, m.detail)];
}

/** The page of a model. */
export function modelLink(id) {
  return `#/models/${encodeURIComponent(id)}`;
}

function refusals(counts) {
  const all = total(counts);
  if (!all) return null;
  const most = Object.entries(counts).sort((a, b) => b[1] - a[1]).slice(0, 2);
  return [number(all), " ", h("span", { class: "small" }, most.map(([reason, count]) => `${reason.replaceAll("_", " ")} ${count}`).join(", "))];
}

function engines(rows) {
  return rows.map((row, i) => [i ? ", " : "", row.engine, " ", h("span", { class: row.error ? "state bad" : "small", title: row.error }, row.error ? "failed" : `v${row.version}`)]);
}

/** Jobs as a table; `changed()` is called when one was cancelled. */
export function jobTable(jobs, changed, withModel = true) {
  return table(
    [
      { label: "job", cell: (j) => h("span", { class: "mono" }, j.id) },
      { label: "state", cell: (j) => [h("span", { class: stateClass(jobState(j.state)) }, jobState(j.state)), j.requested && j.requested !== "cancel" && h("span", { class: "small" }, ` ${j.requested} asked`)] },
      withModel && { label: "model", cell: (j) => h("a", { href: modelLink(j.model_id) }, j.model_name) },
      { label: "kind", cell: (j) => j.kind },
      { label: "groups", number: true, cell: (j) => [number(j.groups), j.groups_rejected > 0 && h("span", { class: "small" }, ` (${j.groups_rejected} refused)`)] },
      { label: "step", number: true, cell: (j) => (j.step === null ? null : h("a", { href: `${modelLink(j.model_id)}/steps/${j.step}` }, number(j.step))) },
      { label: "created", cell: (j) => moment(j.created_at) },
      { label: "took", cell: (j) => (j.started_at ? duration(j.started_at, j.completed_at) : null) },
      { label: "message", cell: (j) => j.message },
      { label: "", cell: (j) => (j.can_cancel ? cancelButton(j, changed) : null) },
    ].filter(Boolean),
    jobs,
  );
}

function cancelButton(job, changed) {
  const button = h("button", {}, "Cancel");
  button.addEventListener("click", async () => {
    if (!window.confirm(`Cancel job ${job.id}? This can't be taken back.`)) return;
    button.disabled = true;
    try {
      await ask(`jobs/${encodeURIComponent(job.id)}/cancel`, { method: "POST" });
      await changed();
    } catch (error) {
      button.replaceWith(h("span", { class: "problem" }, error.message));
    }
  });
  return button;
}
