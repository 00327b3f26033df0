// Numbers, times and names as people read them.

/** Four significant digits; whole numbers as they are; a dash for none. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-4 ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

/** A moment: the time, with the date where it is not today's. */
export function moment(text) {
  if (!text) return "–";
  const time = new Date(text);
  const clock = time.toLocaleTimeString("en-GB");
  return time.toDateString() === new Date().toDateString() ? clock : `${day(time)} ${clock}`;
}

/** A date. */
export function day(time) {
  const two = (n) => String(n).padStart(2, "0");
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
}

/** Seconds between two moments, in the largest units that matter. */
export function duration(from, to) {
  if (!from) return "–";
  const seconds = Math.max(0, ((to ? new Date(to) : new Date()) - new Date(from)) / 1000);
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** `zero_variance` as `zero variance`. */
export function words(name) {
  return name.replaceAll("_", " ");
}

/** A job's state, short. */
export function jobState(state) {
  return state.replace("JOB_STATE_", "").toLowerCase();
}

const GOOD = new Set(["active", "completed", "running"]);
const BAD = new Set(["failed", "diverged", "stopped"]);

/** The class that says how good a state is. */
export function stateClass(state) {
  return `state ${GOOD.has(state) ? "good" : BAD.has(state) ? "bad" : "wait"}`;
}

/** The sum of an object's values. */
export function total(counts) {
  return Object.values(counts).reduce((sum, count) => sum + count, 0);
}
