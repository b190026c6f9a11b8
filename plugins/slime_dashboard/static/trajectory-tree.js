// The turns of a session as a tree: each turn once, forks indented, the chosen branch marked.

import { element } from "./shell.js";
import { quoted } from "./trajectory-text.js";

const ROW = 64; // px, as in trajectory.css
const INDENT = 20;
const LEFT = 13;
const SVG = "http://www.w3.org/2000/svg";

/**
 * Return the rows of the tree in order of display: `{turn, prompt, depth, parent}`. A row with `prompt` and without
 * `turn` is a prompt that several answers have in common. `parent` is the place of the row that it continues, or null.
 */
export function rowsOf(turns) {
  const known = new Set(turns.map((turn) => turn.number));
  const answersTo = new Map(); // by turn, or null: groups of answers to one prompt
  for (const turn of turns) {
    const before = known.has(turn.before) ? turn.before : null;
    if (!answersTo.has(before)) answersTo.set(before, new Map());
    const groups = answersTo.get(before);
    if (!groups.has(turn.prompt)) groups.set(turn.prompt, []);
    groups.get(turn.prompt).push(turn);
  }
  const rows = [];
  // A list instead of recursion: a session may have thousands of turns in a row.
  const left = [];
  const pushGroups = (before, depth, parent) => {
    const groups = [...(answersTo.get(before)?.values() ?? [])];
    const inner = before !== null && groups.length > 1 ? depth + 1 : depth;
    for (const group of groups.reverse()) left.push({ group, depth: inner, parent });
  };
  pushGroups(null, 0, null);
  while (left.length) {
    const { group, turn, depth, parent } = left.pop();
    const place = rows.length;
    if (turn || group.length === 1) {
      const shown = turn ?? group[0];
      rows.push({ turn: shown, prompt: !turn, depth, parent });
      pushGroups(shown.number, depth, place);
    } else {
      rows.push({ turn: null, prompt: group[0], depth, parent });
      for (const one of [...group].reverse()) left.push({ turn: one, depth: depth + 1, parent: place });
    }
  }
  return rows;
}

/** Return the numbers of the turns from the first one to `number`. */
export function pathTo(turns, number) {
  const byNumber = new Map(turns.map((turn) => [turn.number, turn]));
  const path = new Set();
  for (let at = byNumber.get(number); at && !path.has(at.number); at = byNumber.get(at.before)) path.add(at.number);
  return path;
}

/** Draw the tree of `turns` into `parent`, as ARIA's tree: one tab stop. `choose` is called with the number of a turn. */
export function drawTree(parent, turns, chosen, choose) {
  const rows = rowsOf(turns);
  const path = pathTo(turns, chosen);
  const isOn = (row) => (row.turn ? path.has(row.turn.number) : turns.some((turn) => turn.prompt === row.prompt.prompt && path.has(turn.number)));
  const on = rows.map(isOn);
  const x = (row) => LEFT + row.depth * INDENT;
  const y = (place) => place * ROW + ROW / 2;
  const svg = document.createElementNS(SVG, "svg");
  const width = Math.max(0, ...rows.map(x)) + LEFT;
  svg.setAttribute("width", width);
  svg.setAttribute("height", rows.length * ROW);
  svg.setAttribute("aria-hidden", "true");
  const add = (tag, attributes) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    svg.append(made);
  };
  const line = (row, place) => {
    const from = rows[row.parent];
    const start = `M${x(from)} ${y(row.parent)}`;
    const isOnPath = on[place] && on[row.parent];
    const d =
      from.depth === row.depth ? `${start}V${y(place)}` : `${start}V${y(place) - 12}q0 12 12 12H${x(row)}`;
    add("path", { d, class: isOnPath ? "rail on" : "rail" });
  };
  for (const wanted of [false, true]) {
    rows.forEach((row, place) => {
      if (row.parent !== null && (on[place] && on[row.parent]) === wanted) line(row, place);
    });
  }
  rows.forEach((row, place) => {
    const kind = `dot${on[place] ? " on" : ""}`;
    if (row.turn) add("circle", { cx: x(row), cy: y(place), r: row.turn.number === chosen ? 7 : 5, class: kind });
    else add("rect", { x: x(row) - 5, y: y(place) - 5, width: 10, height: 10, rx: 2, class: kind });
  });
  const list = element("ol", { class: "rows", role: "tree", "aria-labelledby": "turns-title" });
  rows.forEach((row, place) => list.append(rowElement(row, on[place], chosen, choose, x(row))));
  const items = [...list.querySelectorAll("[role=treeitem]")];
  const current = Math.max(0, rows.findIndex((row) => row.turn?.number === chosen));
  if (items.length) items[current].tabIndex = 0;
  list.addEventListener("keydown", (event) => moveFocus(event, rows, items));
  const hadFocus = parent.contains(document.activeElement);
  parent.replaceChildren(svg, list);
  if (hadFocus) items[current]?.focus({ preventScroll: true });
}

/** Move the focus: ArrowLeft to the row that this one continues, ArrowRight to the first row that continues this one. */
function moveFocus(event, rows, items) {
  const at = items.indexOf(event.target);
  if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
  const to = {
    ArrowUp: at - 1,
    ArrowDown: at + 1,
    ArrowLeft: rows[at].parent,
    ArrowRight: rows.findIndex((row) => row.parent === at),
    Home: 0,
    End: items.length - 1,
  }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (!items[to]) return;
  for (const item of items) item.tabIndex = -1;
  items[to].tabIndex = 0;
  items[to].focus();
}

function rowElement(row, isOn, chosen, choose, indent) {
  const { turn } = row;
  const place = { role: "treeitem", "aria-level": row.depth + 1, tabindex: -1 };
  if (!turn) {
    const title = element("span", { class: "row-title" }, "Shared prompt");
    const meta = element("span", { class: "row-meta" }, `${count(row.prompt.prompt_tokens, "token")}, several answers`);
    const item = element("li", { role: "none" }, element("div", { class: "shared", ...place }, title, meta));
    item.style.paddingLeft = `${indent + 23}px`;
    return item;
  }
  const added = row.prompt ? `+${turn.prompt_tokens.toLocaleString("en")} prompt · ` : "";
  const kept = turn.kept < turn.tokens ? `, ${turn.kept} kept` : "";
  const versions = turn.versions.map((version) => (version === null ? "no version" : /^\d/.test(version) ? `v${version}` : version));
  const meta = `${added}${turn.tokens.toLocaleString("en")} sampled${kept} · ${shortened(versions, 3)}${turn.finish ? ` · ${turn.finish}` : " · no end"}`;
  const before = turn.before === null ? "" : `, continues turn ${turn.before}`;
  const button = element(
    "button",
    {
      type: "button",
      ...place,
      class: isOn ? "turn on" : "turn",
      "aria-selected": String(turn.number === chosen),
      "aria-current": turn.number === chosen ? "true" : null,
      onclick: () => choose(turn.number),
      dataset: { turn: turn.number },
    },
    element("span", { class: "row-title" }, `Turn ${turn.number}`, element("span", { class: "visually-hidden" }, before), verdictOf(turn)),
    element("span", { class: "row-text" }, turn.preview ? quoted(turn.preview).slice(1, -1) : "no text"),
    element("span", { class: "row-meta", title: meta }, meta),
  );
  const item = element("li", { role: "none" }, button);
  item.style.paddingLeft = `${indent + 10}px`;
  return item;
}

function verdictOf(turn) {
  if (!turn.is_leaf) return null;
  if (!turn.inexact_reason) return element("span", { class: "mark ok" }, "✓ exact");
  return element("span", { class: "mark bad", title: turn.inexact_reason.words }, "✗ not exact");
}

function shortened(names, most) {
  const shown = names.slice(0, most).join(", ") || "no version";
  return names.length > most ? `${shown} and ${names.length - most} more` : shown;
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}
