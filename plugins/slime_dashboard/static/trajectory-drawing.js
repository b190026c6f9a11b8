// Elements of tokens, and of the places where tokenising again gives other tokens.

import { element } from "./shell.js";
import { nameOf, writeToken } from "./trajectory-text.js";

const BOUNDS = [0.9, 0.5, 0.2, 0.05, 0.01]; // probabilities between two colours
const MOST_BELOW = 24; // a place with more tokens is not drawn with both sequences, one below the other

/** Return the number of the colour of a probability, 0 for the most likely. */
export function binOf(logprob) {
  const probability = Math.exp(logprob);
  const found = BOUNDS.findIndex((bound) => probability >= bound);
  return found < 0 ? BOUNDS.length : found;
}

/** Names of the colours of probabilities, most likely first. */
export const BINS = ["≥ 90 %", "50–90 %", "20–50 %", "5–20 %", "1–5 %", "< 1 %"];

/** Return a token. `colours`: the number of each weight version. */
export function tokenElement(about, colours) {
  const { index, span } = about;
  const token = document.createElement("span");
  token.className = "token";
  token.setAttribute("role", "option");
  token.tabIndex = -1;
  const { dataset } = token;
  dataset.index = index;
  dataset.role = span.role;
  if (!span.mask) dataset.mask = "0";
  if (about.logprob !== null) dataset.bin = binOf(about.logprob);
  if (span.mask) {
    dataset.version = colours.get(span.version) % 8;
    if (index === span.start) dataset.begins = span.version ?? "no version";
  }
  if (!about.text?.trim()) token.setAttribute("aria-label", nameOf(about)); // screen readers pass over spaces
  writeToken(token, about);
  return token;
}

/** Return a place, or its part from token `from` on, with the new tokens below unless it is long. */
export function placeElement(place, from, tokens) {
  const above = element("span", { class: "recorded", role: "presentation" }, ...tokens);
  const group = element("span", { class: "place", role: "presentation" }, above);
  const isWhole = from === place.start && tokens.length === place.end - place.start && place.again.length === place.again_count;
  const breaks = [...place.recorded, ...place.again].some((one) => one.text?.includes("\n"));
  if (!isWhole || breaks || Math.max(tokens.length, place.again.length) > MOST_BELOW) {
    group.classList.add("long");
    return group;
  }
  const below = element("span", { class: "below", "aria-hidden": "true" });
  for (const one of place.again) {
    const token = element("span", { class: "new" });
    writeToken(token, one, true);
    below.append(token);
  }
  group.append(below);
  return group;
}

/** Return the name of a part, and facts about its tokens. */
export function headlineOf({ role, turn, start, end, spans }) {
  const size = `${start.toLocaleString("en")}–${(end - 1).toLocaleString("en")} · ${(end - start).toLocaleString("en")} token${end - start === 1 ? "" : "s"}`;
  if (role === "prompt") return { name: `Prompt of turn ${turn}`, meta: size };
  const versions = [...new Set(spans.map((span) => span.version))].map((version) => version ?? "no version");
  const whose = turn === null ? "Answer of another session" : `Answer of turn ${turn}`;
  const trained = spans.every((span) => span.mask) ? "" : " · loss mask 0";
  const weights = spans.some((span) => span.mask) ? ` · weights ${versions.slice(0, 4).join(", ")}` : "";
  return { name: role === "reused" ? `${whose}, re-used` : whose, meta: `${size}${weights}${trained}` };
}

/** Return the parts of a branch: runs of spans with one role and one turn. */
export function sectionsOf(spans) {
  const sections = [];
  for (const span of spans) {
    const last = sections.at(-1);
    if (last && last.role === span.role && last.turn === span.turn) {
      last.end = span.end;
      last.spans.push(span);
    } else {
      sections.push({ role: span.role, turn: span.turn, start: span.start, end: span.end, spans: [span] });
    }
  }
  return sections;
}

/** Remove the line end of the last token: the list ends there anyway. Its sign stays. */
export function withoutLastBreak(list) {
  let last = list.lastChild;
  while (last instanceof Element) last = last.lastChild;
  if (last?.data === "\n") last.remove();
}

/** Return the place of the first of `places` that does not end before `index`. */
export function placeFrom(places, index) {
  let low = 0;
  let high = places.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle].end < index || (places[middle].end === index && places[middle].start < index)) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function placeAt(places, index) {
  for (let at = placeFrom(places, index); at < places.length && places[at].start <= index; at += 1) {
    if (places[at].end > index) return at;
  }
  return -1;
}

/** Return the character that the bytes of the token at `at` and of its neighbours make, or null. */
export function characterAt(page, at) {
  for (let start = at; start >= Math.max(0, at - 3) && page.bytes[start]; start -= 1) {
    let hex = "";
    for (let end = start; end < start + 4 && page.bytes[end]; end += 1) {
      hex += page.bytes[end];
      if (end < at) continue;
      try {
        const bytes = Uint8Array.from(hex.match(/../g), (one) => parseInt(one, 16));
        return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
      } catch {
        // Not a whole character yet.
      }
    }
  }
  return null;
}
