// Elements from data. Text becomes text nodes only; nothing here reads HTML, so what a trajectory holds stays text.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element: `h("a", {href: "#/", class: "x", onclick: f}, "text", other)`; null children are left out. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/**
 * A table. Columns: {label, cell(row), number, minor}; one that is empty in all rows is left out. On a narrow screen its rows become cards,
 * or, where `compact`, it goes without its minor columns.
 */
export function table(columns, rows, compact = false) {
  const cells = rows.map((row) => columns.map((column) => [column.cell(row)].flat(Infinity).filter((part) => part !== null && part !== undefined && part !== false && part !== "")));
  const shown = columns.map((column, i) => ({ ...column, i })).filter(({ i }) => cells.some((row) => row[i].length));
  const named = (column, more) => [column.number && "number", column.minor && "minor", more].filter(Boolean).join(" ") || null;
  return h(
    "table",
    { class: compact ? "compact" : "cards" },
    h("thead", {}, h("tr", {}, shown.map((column) => h("th", { class: named(column) }, column.label)))),
    h("tbody", {}, cells.map((row) => h("tr", {}, shown.map((column) => h("td", { "data-label": column.label, class: named(column, !row[column.i].length && "nothing") }, h("span", {}, row[column.i])))))),
  );
}

/** Names and values side by side; empty ones are left out. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** A titled part of a page. */
export function sheet(title, ...children) {
  return h("section", { class: "sheet" }, title && h("h2", {}, title), children);
}

/** Where one is: links, then the place itself. */
export function trail(...parts) {
  return h("nav", { class: "trail", "aria-label": "Where this is" }, parts.flatMap((part, i) => (i ? [" › ", part] : [part])));
}
