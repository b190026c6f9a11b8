// The details of one token, beside it.

import { element } from "./shell.js";
import { nameOf, quoted, spaced } from "./trajectory-text.js";

const NUMBER = new Intl.NumberFormat("en");
const card = document.getElementById("token-card");

/** Show the details of a token beside it. `path`: the turns of the branch, first one first. */
export function showCard(token, about, path) {
  const { span } = about;
  const rows = [["Token", `${NUMBER.format(about.index)}, id ${about.id}`]];
  if (about.text === null) {
    rows.push(["Bytes", about.bytes ? `${spaced(about.bytes)}, not UTF-8 by themselves` : "not known"]);
    if (about.character) rows.push(["Character", `part of ${quoted(about.character)}`]);
  }
  rows.push(["Role", roleWords(span, path)]);
  if (about.logprob !== null) rows.push(["Logprob", `${about.logprob.toPrecision(4)}, probability ${percent(about.logprob)}`]);
  else if (span.mask) rows.push(["Logprob", "the engine gave none"]);
  rows.push(["Loss mask", span.mask ? "1, trained on" : "0, not trained on"]);
  if (span.mask) rows.push(["Weights", span.version === null ? "no version given" : span.version]);
  if (about.place) rows.push(["Again", about.place.again.slice(0, 8).map(nameOf).join(" ") || "nothing"]);
  card.replaceChildren(
    element("p", { class: "card-title mono" }, about.text === null ? nameOf(about) : about.text === "" ? "no text" : quoted(about.text)),
    element("dl", {}, rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
  );
  card.hidden = false;
  const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card;
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8));
  const isBelow = box.bottom + height + 12 < window.innerHeight || box.top < height + 12;
  card.style.left = `${left + window.scrollX}px`;
  card.style.top = `${(isBelow ? box.bottom + 8 : box.top - height - 8) + window.scrollY}px`;
  document.querySelector("[aria-describedby='token-card']")?.removeAttribute("aria-describedby");
  token.setAttribute("aria-describedby", "token-card");
}

/** Hide the details. */
export function hideCard() {
  card.hidden = true;
}

function roleWords({ role, turn }, path) {
  if (role === "prompt") return `prompt of turn ${turn}`;
  if (turn === null) return "re-used, sampled for another session";
  if (role === "sampled") return `sampled in turn ${turn}`;
  const later = path.filter((number) => number > turn);
  const named = later.length > 5 ? `${later.slice(0, 4).join(", ")} and ${later.length - 4} more` : later.join(", ");
  const by = `${later.length === 1 ? "turn" : "turns"} ${named}`;
  return later.length ? `sampled in turn ${turn}, re-used by ${by}` : `sampled in turn ${turn}, re-used`;
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 0.01 ? `${value.toPrecision(3)} %` : `${value.toExponential(1)} %`;
}
