// The dashboard: which page the address names, and drawing it anew when something changed.

import { follow } from "./access.js";
import { h } from "./dom.js";
import { modelPage } from "./model.js";
import { overviewPage } from "./overview.js";
import { stepPage } from "./step.js";

const EVERY_MS = 800;

let page = null;
let loading = false;
let again = false;

function named() {
  const [kind, id, part, number] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (kind === "models" && id && part === "steps" && /^\d+$/.test(number ?? "")) return stepPage(id, Number(number));
  if (kind === "models" && id) return modelPage(id);
  return overviewPage();
}

/** Load what is shown; what is asked for meanwhile is done once more afterwards, and not more often than every so often. */
async function load() {
  if (loading) {
    again = true;
    return;
  }
  loading = true;
  do {
    again = false;
    const shown = page;
    try {
      await shown.load();
      show(shown, null);
    } catch (error) {
      show(shown, error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, again && page !== shown ? 0 : EVERY_MS));
  } while (again);
  loading = false;
}

function show(shown, problem) {
  if (shown !== page) return;
  const main = document.getElementById("page");
  const said = problem && h("p", { class: "problem", role: "alert" }, problem);
  if (main.firstElementChild === shown.element && !problem && main.children.length === 1) return;
  main.replaceChildren(...[said, shown.element].filter(Boolean));
}

function open() {
  page = named();
  document.title = "Headrace";
  window.scrollTo(0, 0);
  // Shown at once: charts draw when they have a width.
  show(page, null);
  load();
}

window.addEventListener("hashchange", open);
open();
follow(
  (change) => {
    if (page.concerns(change)) load();
  },
  (state, account) => {
    if (account) document.getElementById("account").textContent = `account ${account}`;
    const live = document.getElementById("live");
    live.textContent = state;
    live.classList.toggle("on", state === "live");
  },
);
