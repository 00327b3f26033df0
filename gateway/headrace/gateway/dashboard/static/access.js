// Asking the gateway. Where it wants a key the page asks for it once and keeps it for this tab; it travels in a header, never in an address.

import { h } from "./dom.js";

const KEPT = "headrace-token";
const RETRY_MS = [500, 1000, 2000, 5000];

let asking = null;

/** What the gateway answers to a path below /dashboard/api, as an object. Asks for a key where one is needed. */
export async function ask(path, options = {}) {
  const response = await answered(path, options);
  return response.json();
}

/**
 * Follow what changes: `onChange({models, all})`, `onState("live" | "paused" | "reconnecting", account)`. Goes on until the page is left.
 * Paused while nobody looks: a browser has few connections to one host, and each tab that follows holds one.
 */
export async function follow(onChange, onState) {
  let account = null;
  for (let failures = 0, before = false; ; ) {
    if (document.hidden) {
      onState("paused", account);
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      continue;
    }
    const left = new AbortController();
    const leave = () => document.hidden && left.abort();
    document.addEventListener("visibilitychange", leave);
    try {
      const response = await answered("stream", { signal: left.signal });
      for await (const { name, data } of events(response.body)) {
        if (name === "hello") {
          account = data.account;
          onState("live", account);
          if (before) onChange({ models: [], all: true });
          [before, failures] = [true, 0];
        }
        if (name === "change") onChange(data);
      }
    } catch {
      // It is asked again, below.
    }
    document.removeEventListener("visibilitychange", leave);
    if (left.signal.aborted) continue;
    onState("reconnecting", account);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    failures += 1;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    yield* parts.map(parsed);
  }
}

async function answered(path, options) {
  for (;;) {
    const token = sessionStorage.getItem(KEPT);
    const headers = { "X-Headrace-Dashboard": "1", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
    const response = await fetch(`/dashboard/api/${path}`, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (response.ok) return response;
    const said = await response.json().then((body) => body.detail, () => null);
    const message = typeof said === "string" ? said : `the gateway answered ${response.status}`;
    if (response.status !== 401) throw new Error(message);
    // Another request may have asked meanwhile.
    if (sessionStorage.getItem(KEPT) === token) await keyAsked(token ? message : null);
  }
}

/** Show the form until a key is given; requests that need one meanwhile wait for the same form. */
function keyAsked(problem) {
  sessionStorage.removeItem(KEPT);
  asking ??= new Promise((given) => {
    const page = document.getElementById("page");
    const input = h("input", { type: "password", name: "key", placeholder: "hr_…", autocomplete: "off", required: true, "aria-label": "Key" });
    const form = h("form", {}, input, h("button", {}, "Open"));
    const card = h(
      "section",
      { class: "sheet key" },
      h("h2", {}, "A key is needed"),
      h("p", {}, "Give a token of this gateway (", h("code", {}, "headrace tokens create"), "). It is kept in this tab until you close it."),
      problem && h("p", { class: "problem" }, problem),
      form,
    );
    page.hidden = true;
    page.before(card);
    input.focus();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEPT, input.value.trim());
      card.remove();
      page.hidden = false;
      asking = null;
      given();
    });
  });
  return asking;
}

function parsed(text) {
  const fields = Object.fromEntries(text.split("\n").filter((line) => !line.startsWith(":")).map((line) => line.split(/: (.*)/s, 2)));
  return { name: fields.event, data: fields.data ? JSON.parse(fields.data) : null };
}
