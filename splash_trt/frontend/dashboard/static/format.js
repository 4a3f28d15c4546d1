// Numbers for people to read, and elements from plain values.

const WHOLE = new Intl.NumberFormat("en");
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const MINUTES = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
export const NONE = "–";
const SPACE = "\u00a0"; // a line never ends between a number and its unit

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  if (!isNumber(value)) return NONE;
  return value >= 10 || Number.isInteger(value) ? WHOLE.format(Math.round(value)) : value.toFixed(1);
}

/** With a unit of three digits: 1.2 k, 34 M. */
export function short(value) {
  if (!isNumber(value)) return NONE;
  const unit = ["", "k", "M", "G", "T"].map((prefix) => prefix && SPACE + prefix);
  let power = 0;
  while (Math.abs(value) >= 1000 && power < unit.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)}${unit[power]}`;
}

export function bytes(value) {
  return isNumber(value) ? (value < 1000 ? `${Math.round(value)}${SPACE}B` : `${short(value)}B`) : NONE;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds === 0) return `0${SPACE}s`;
  if (Math.abs(seconds) < 0.1) return `${(seconds * 1000).toFixed(Math.abs(seconds) < 0.01 ? 1 : 0)}${SPACE}ms`;
  return Math.abs(seconds) < 100 ? `${Number(seconds.toPrecision(3))}${SPACE}s` : `${Math.round(seconds)}${SPACE}s`;
}

export function signed(seconds) {
  if (!isNumber(seconds)) return NONE;
  return `${seconds < 0 ? "−" : seconds > 0 ? "+" : ""}${duration(Math.abs(seconds))}`;
}

export function percent(share) {
  if (!isNumber(share)) return NONE;
  const value = share * 100;
  const digits = Math.abs(value) > 0 && Math.abs(value) < 1 ? 1 : 0;
  return `${value.toFixed(digits).replace("-", "−")}${SPACE}%`;
}

export const clock = (seconds) => CLOCK.format(seconds * 1000);
export const minutes = (seconds) => MINUTES.format(seconds * 1000);

export const layoutName = (layout) => (layout ? String(layout).toUpperCase() : NONE);

export function plural(number, what) {
  return `${count(number)} ${what}${number === 1 ? "" : "s"}`;
}

/** element("td", { class: "num" }, "text", child): text is never read as HTML. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function chip(layout) {
  return element("span", { class: `chip ${layout || "none"}` }, layoutName(layout));
}

/** Leaves it as it is where nothing changes, so that nobody's reading or focus is disturbed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** make(): the children; they are made anew only where `key` has changed. */
export function setChildren(node, key, make) {
  const text = JSON.stringify(key);
  if (node.shownKey === text) return;
  node.shownKey = text;
  node.replaceChildren(...make());
}

/** A row whose cells say which column they are in, for the narrow form. The roles survive the style of that form. */
export function tableRow(table, cells) {
  const heads = [...table.tHead.rows[0].cells];
  const row = element("tr", { role: "row" });
  cells.forEach((cell, index) => {
    const tag = index === 0 ? "th" : "td";
    const attributes = { class: heads[index].className || null, "data-label": heads[index].textContent };
    Object.assign(attributes, index === 0 ? { scope: "row", role: "rowheader" } : { role: "cell" });
    row.append(element(tag, attributes, ...(Array.isArray(cell) ? cell : [cell])));
  });
  return row;
}

export function giveRoles(table) {
  table.setAttribute("role", "table");
  for (const part of [table.tHead, ...table.tBodies]) part.setAttribute("role", "rowgroup");
  for (const row of table.tHead.rows) {
    row.setAttribute("role", "row");
    for (const cell of row.cells) cell.setAttribute("role", "columnheader");
  }
}
