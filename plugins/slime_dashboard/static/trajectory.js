// The trajectory viewer: one session, its turns as a tree, and the tokens of one branch.

import { element, getData, pageAddress, poll, setStatus, KeyNeeded } from "./shell.js";
import { hideCard, showCard } from "./trajectory-card.js";
import { BINS } from "./trajectory-drawing.js";
import { quoted, writeToken } from "./trajectory-text.js";
import { Tokens } from "./trajectory-tokens.js";
import { drawTree, pathTo } from "./trajectory-tree.js";

const byId = (id) => document.getElementById(id);
const MOST_LISTED = 100; // places of the table
const NUMBER = new Intl.NumberFormat("en");
const ROLES = {
  prompt: ["Prompt", "not sampled"],
  reused: ["Re-used", "sampled earlier, sent again"],
  sampled: ["Sampled", "in the last turn"],
};

let session = null; // the answer about the session
let tokens = null;
let comparison = null;
let place = -1; // the place that was visited last
let search = { wanted: null, place: -1 }; // what was found last in the text
let asked = { session: null, turn: null };

/** Read what the address asks for. */
function fromAddress() {
  const parameters = new URLSearchParams(location.search);
  const turn = parameters.get("turn");
  asked = { session: parameters.get("session"), turn: turn === null ? null : Number(turn) };
  byId("session").value = asked.session ?? "";
}

function parametersOf({ session: name, turn }) {
  return turn === null ? { session: name } : { session: name, turn };
}

async function load() {
  if (!asked.session) {
    setStatus("wait", "No session is chosen");
    showProblem("Enter the name of a session. The overview lists the sessions of this router.");
    return;
  }
  let found;
  try {
    found = await getData("trajectory", parametersOf(asked));
  } catch (error) {
    if (error instanceof KeyNeeded) throw error;
    showProblem(error.message);
    setStatus("bad", "No trajectory");
    return;
  }
  const isSame = session && JSON.stringify(session) === JSON.stringify(found);
  session = found;
  byId("problem").hidden = true;
  byId("viewer").hidden = false;
  document.title = `${session.session} · trajectory · slime-router`;
  setStatus("ok", `${countOf(session.turn_count, "turn")}, ${countOf(session.leaf_count, "branch", "branches")}`);
  if (!isSame) show();
}

function showProblem(message) {
  session = null;
  tokens?.close();
  tokens = null;
  hideCard();
  byId("viewer").hidden = true;
  byId("problem").hidden = false;
  byId("problem").textContent = message;
}

function show() {
  const { branch } = session;
  byId("facts-title").replaceChildren("Session ", element("bdi", { class: "mono" }, quoted(session.session).slice(1, -1)));
  showVerdicts();
  showCounts();
  const shown = session.turns.length;
  byId("turns-note").textContent =
    shown < session.turn_count
      ? `The newest ${NUMBER.format(shown)} of ${NUMBER.format(session.turn_count)} turns.`
      : `${countOf(session.leaf_count, "branch", "branches")}. A prefix that branches share is drawn once.`;
  drawTree(byId("tree"), session.turns, branch.turn, choose);
  byId("branch-title").textContent = `Tokens up to turn ${branch.turn}`;
  showTokens();
}

function choose(turn) {
  asked = { session: asked.session, turn };
  history.replaceState(null, "", pageAddress("trajectory", parametersOf(asked)));
  refresh();
}

function showVerdicts() {
  const { branch, complete } = session;
  const verdict = (kind, sign, title, words) =>
    element("li", { dataset: { kind } }, element("strong", {}, `${sign} ${title}`), words ? element("span", {}, words) : null);
  const items = [
    branch.exact
      ? verdict("ok", "✓", "Exact", "An engine consumed or sampled every token of this branch, in this context.")
      : verdict("bad", "✗", "Not exact", `${capital(branch.inexact_reason.words)} (${branch.inexact_reason.code}).`),
    complete
      ? verdict("ok", "✓", "Complete", "No answer of this session is lost.")
      : verdict("warn", "!", "Not complete", "Something of this session was evicted, or could not be recorded."),
  ];
  if (branch.experts?.exact) items.push(verdict("ok", "✓", "Experts exact", `Routed experts of all tokens: ${branch.experts.shape.join(" × ")}.`));
  if (branch.experts && !branch.experts.exact) items.push(verdict("warn", "!", "Experts not exact", `${capital(branch.experts.words)} (${branch.experts.code}).`));
  byId("verdicts").replaceChildren(...items);
}

function showCounts() {
  const { branch } = session;
  const counts = [
    ["Tokens", branch.tokens, null],
    ["Prompt", branch.counts.prompt, "prompt"],
    ["Re-used", branch.counts.reused, "reused"],
    ["Sampled", branch.counts.sampled, "sampled"],
    ["Trained on", branch.counts.trained, null],
  ];
  byId("counts").replaceChildren(
    ...counts.map(([name, number, role]) => element("div", { dataset: role ? { role } : {} }, element("dt", {}, name), element("dd", {}, NUMBER.format(number)))),
  );
}

function showTokens() {
  const { branch } = session;
  tokens?.close();
  hideCard();
  comparison = null;
  place = -1;
  search = { wanted: null, place: -1 };
  byId("found").textContent = "";
  const colours = new Map([...new Set(branch.spans.filter((span) => span.mask).map((span) => span.version))].map((version, number) => [version, number]));
  const here = { session: session.session, turn: branch.turn };
  const path = [...pathTo(session.turns, branch.turn)].sort((one, other) => one - other);
  tokens = new Tokens(byId("tokens"), branch, colours, {
    load: (start, limit) => getData("trajectory/tokens", { ...here, start, limit }),
    show: (token, about) => showCard(token, about, path),
    hide: hideCard,
    fail: (error) => setStatus("bad", error.message),
  });
  showLegend(colours);
  compare(here);
}

async function compare(here) {
  byId("again-tools").hidden = true;
  byId("places").hidden = true;
  byId("again").textContent = "Tokenising the text again …";
  let found;
  try {
    found = await getData("trajectory/retokenised", here);
  } catch (error) {
    found = { compared: false, why: error.message };
  }
  if (session?.branch.turn !== here.turn || session.session !== here.session) return; // another branch was chosen
  if (!found.compared) {
    byId("again").textContent = `The text was not tokenised again: ${found.why}.`;
    return;
  }
  comparison = found;
  const all = found.changed_trained === found.changed;
  const trained = found.changed_trained ? `, ${all ? "all" : NUMBER.format(found.changed_trained)} of them trained on` : "";
  byId("again").textContent = found.place_count
    ? `Tokenising the text again would change ${NUMBER.format(found.changed)} of ${NUMBER.format(found.tokens)} tokens${trained}, in ${countOf(found.place_count, "place")}.`
    : `Tokenising the text again would give the same ${NUMBER.format(found.tokens)} tokens.`;
  byId("again").dataset.kind = found.place_count ? "warn" : "ok";
  if (!found.place_count) return;
  byId("again-tools").hidden = false;
  tokens.compare(found.places);
  showPlaces();
}

function showPlaces() {
  const { places, place_count: all } = comparison;
  const chips = (list, total) => {
    const cell = element("td", { class: "chips" });
    for (const one of list) {
      const chip = element("span", { class: "chip" });
      writeToken(chip, one, true);
      chip.append(element("span", { class: "chip-id" }, String(one.id)));
      cell.append(chip);
    }
    if (total > list.length) cell.append(` and ${NUMBER.format(total - list.length)} more`);
    if (!total) cell.append("nothing");
    return cell;
  };
  const rows = places.slice(0, MOST_LISTED).map((one, number) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, element("button", { type: "button", class: "link", onclick: () => visit(number) }, rangeOf(one))),
      chips(one.recorded, one.end - one.start),
      chips(one.again, one.again_count),
    ),
  );
  byId("places").hidden = false;
  byId("places").querySelector("summary").textContent = all > rows.length ? `The first ${rows.length} of ${NUMBER.format(all)} places, side by side` : `${all === 1 ? "The place" : `All ${all} places`}, side by side`;
  byId("places").querySelector("tbody").replaceChildren(...rows);
}

function rangeOf({ start, end }) {
  if (end - start < 2) return NUMBER.format(start);
  return `${NUMBER.format(start)}–${NUMBER.format(end - 1)}`;
}

function visit(number) {
  const { places } = comparison;
  place = (number + places.length) % places.length;
  tokens.focus(Math.min(places[place].start, session.branch.tokens - 1));
}

/** Show the next place of the wanted text, after the place that was found last. */
async function findNext() {
  const wanted = byId("wanted").value;
  const here = tokens;
  if (!wanted || !here) return;
  byId("found").textContent = "Searching …";
  let found;
  try {
    found = await here.find(wanted);
  } catch (error) {
    byId("found").textContent = error.message;
    return;
  }
  if (here !== tokens) return; // another branch was chosen
  search = { wanted, place: search.wanted === wanted ? (search.place + 1) % (found.length || 1) : 0 };
  byId("found").textContent = found.length ? `${NUMBER.format(search.place + 1)} of ${NUMBER.format(found.length)}` : "Not found";
  if (found.length) here.reveal(found[search.place]);
}

function showLegend(colours) {
  const mode = document.querySelector("#modes input:checked").value;
  byId("tokens").dataset.mode = mode;
  const entry = (dataset, name, words) => element("li", {}, element("span", { class: "token swatch", dataset, "aria-hidden": "true" }, "abc"), element("span", {}, name, words ? element("span", { class: "muted" }, ` ${words}`) : null));
  const legend = byId("legend");
  legend.dataset.mode = mode;
  const { counts } = session.branch;
  if (mode === "role") {
    legend.replaceChildren(...Object.entries(ROLES).map(([role, [name, words]]) => entry({ role }, `${name} ${NUMBER.format(counts[role])}`, words)));
  } else if (mode === "probability") {
    legend.replaceChildren(...BINS.map((name, bin) => entry({ bin }, name)), entry({ role: "prompt" }, "no logprob"));
  } else {
    const sizes = new Map();
    for (const span of session.branch.spans) if (span.mask) sizes.set(span.version, (sizes.get(span.version) ?? 0) + span.end - span.start);
    legend.replaceChildren(...[...colours].map(([version, number]) => entry({ version: number % 8 }, version ?? "no version", countOf(sizes.get(version), "token"))), entry({ role: "prompt" }, "not trained on"));
  }
}

function countOf(number, noun, plural = `${noun}s`) {
  return `${NUMBER.format(number)} ${number === 1 ? noun : plural}`;
}

function capital(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  asked = { session: byId("session").value, turn: null };
  history.pushState(null, "", pageAddress("trajectory", parametersOf(asked)));
  session = null;
  refresh();
});
byId("find-text").addEventListener("submit", (event) => {
  event.preventDefault();
  findNext();
});
window.addEventListener("popstate", () => {
  fromAddress();
  session = null;
  refresh();
});
byId("modes").addEventListener("change", () => showLegend(tokens.colours));
byId("show-again").addEventListener("change", (event) => byId("tokens").classList.toggle("without-again", !event.target.checked));
byId("next-place").addEventListener("click", () => visit(place + 1));
byId("previous-place").addEventListener("click", () => visit(place < 0 ? -1 : place - 1));
window.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideCard();
});
fromAddress();
const refresh = poll(load, 0);
