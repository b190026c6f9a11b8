// The tokens of one branch. Only those near the visible part of the page are in the document.

import { element } from "./shell.js";
import {
  characterAt, headlineOf, placeAt, placeElement, placeFrom, sectionsOf, tokenElement, withoutLastBreak,
} from "./trajectory-drawing.js";
import { BranchText } from "./trajectory-find.js";

const CHUNK = 512; // tokens in one list; a list is drawn and removed as a whole
const PAGE = 4096; // tokens of one request
const NEAR = "1200px"; // lists this near to the window are drawn

/**
 * Shows the tokens of `branch` in `parent`. `load(start, limit)` returns a page of tokens. `colours`: the number of
 * each weight version. `show(element, about)` is called when a token gets the pointer or the focus, `hide()` when it
 * loses them.
 */
export class Tokens {
  constructor(parent, branch, colours, { load, show, hide, fail }) {
    Object.assign(this, { parent, branch, colours, load, show, hide, fail });
    this.pages = new Map();
    this.read = new Map(); // pages that have come
    this.chunks = [];
    this.places = []; // places of the comparison, in order
    this.current = null;
    this.text = null;
    this.observer = new IntersectionObserver((entries) => entries.forEach((entry) => this.#seen(entry)), { rootMargin: NEAR });
    parent.replaceChildren(...sectionsOf(branch.spans).map((section) => this.#section(section)));
    this.listeners = new AbortController();
    const on = (kind, listener) => parent.addEventListener(kind, listener, { signal: this.listeners.signal });
    on("keydown", (event) => this.#key(event));
    on("pointerover", (event) => this.#attend(event.target));
    on("pointerleave", () => this.#leave());
    on("focusin", (event) => this.#attend(event.target));
    on("focusout", () => this.hide());
    on("click", (event) => tokenOf(event.target)?.focus());
  }

  /** Stop observing: another branch takes the place of this one. */
  close() {
    this.observer.disconnect();
    this.listeners.abort();
  }

  /** Mark `places`, and draw their new tokens. */
  compare(places) {
    this.places = places;
    for (const chunk of this.chunks) if (chunk.isDrawn) this.#draw(chunk);
  }

  /** Return the id, text, bytes, logprob, span and place of the token `index`; null until it is loaded. */
  about(index) {
    const page = this.read.get(Math.floor(index / PAGE));
    if (!page) return null;
    const at = index - page.start;
    return {
      index,
      id: page.ids[at],
      text: page.texts[at],
      bytes: page.bytes[at] ?? null,
      logprob: page.logprobs[at],
      span: this.#spanOf(index),
      place: this.places[placeAt(this.places, index)] ?? null,
      character: page.texts[at] === null ? characterAt(page, at) : null,
    };
  }

  /** Move the focus to the token `index`, wherever it is. */
  async focus(index) {
    const token = await this.#shown(index);
    token?.focus({ preventScroll: true });
    token?.scrollIntoView({ block: "nearest" });
  }

  /** Show the token `index` and its details. The focus stays where it is. */
  async reveal(index) {
    const token = await this.#shown(index);
    if (!token) return;
    token.scrollIntoView({ block: "center" });
    this.show(token, this.about(index));
  }

  /** Load all tokens, and return those in which the text `wanted` begins. */
  async find(wanted) {
    for (let number = 0; number * PAGE < this.branch.tokens; number += 1) await this.#page(number);
    this.text ??= new BranchText(this.branch.tokens, (index) => this.about(index));
    return this.text.find(wanted);
  }

  /** Draw the token `index` if needed, make it the current one, and return it; null if there is none. */
  async #shown(index) {
    if (index < 0 || index >= this.branch.tokens) return null;
    const chunk = this.chunks.find((one) => index < one.end);
    if (!chunk.isDrawn && !(await this.#drawn(chunk))) return null; // a drawn chunk needs no await: a held key repeats fast
    this.#setCurrent(index);
    return this.#token(index);
  }

  #section(part) {
    const { role, start, end } = part;
    const title = `section-${start}`;
    const { name, meta } = headlineOf(part);
    const section = element(
      "section",
      { class: "part", dataset: { role }, "aria-labelledby": title },
      element("h3", { id: title }, element("span", { class: "part-name" }, name), element("span", { class: "part-meta" }, meta)),
    );
    for (let from = start; from < end; from += CHUNK) {
      const until = Math.min(from + CHUNK, end);
      const list = element("div", { class: "chunk", role: "listbox", "aria-labelledby": title, "aria-describedby": "keys-help", "aria-orientation": "horizontal", "aria-busy": "true" });
      list.style.minHeight = `${Math.ceil((until - from) / 24) * 2}rem`; // until it is drawn
      const chunk = { start: from, end: until, list, isDrawn: false, role };
      list.chunk = chunk;
      this.chunks.push(chunk);
      this.observer.observe(list);
      section.append(list);
    }
    return section;
  }

  #seen({ isIntersecting, target }) {
    const { chunk } = target;
    if (isIntersecting) this.#drawn(chunk);
    else if (chunk.isDrawn && !target.contains(document.activeElement)) this.#remove(chunk);
  }

  #remove(chunk) {
    chunk.list.style.minHeight = `${chunk.list.offsetHeight}px`;
    chunk.list.replaceChildren();
    chunk.list.setAttribute("aria-busy", "true");
    chunk.isDrawn = false;
  }

  /** Load and draw `chunk`. Returns false if that fails. */
  async #drawn(chunk) {
    try {
      const first = Math.floor(chunk.start / PAGE);
      const last = Math.floor((chunk.end - 1) / PAGE);
      for (let page = first; page <= last; page += 1) await this.#page(page);
    } catch (error) {
      this.fail(error);
      return false;
    }
    if (!chunk.isDrawn) this.#draw(chunk);
    return true;
  }

  #page(number) {
    if (!this.pages.has(number)) {
      const wanted = this.load(number * PAGE, PAGE).then((page) => {
        if (page.total !== this.branch.tokens) throw new Error("The session has changed: load the page again");
        this.read.set(number, page);
      });
      wanted.catch(() => this.pages.delete(number));
      this.pages.set(number, wanted);
    }
    return this.pages.get(number);
  }

  #draw(chunk) {
    const { list, start, end } = chunk;
    const had = list.contains(document.activeElement);
    const made = document.createDocumentFragment();
    let at = placeFrom(this.places, start);
    for (let index = start; index < end; ) {
      const place = this.places[at];
      if (place && place.start <= index && place.end > index) {
        const until = Math.min(place.end, end);
        made.append(this.#place(place, index, until));
        index = until;
        if (until === place.end) at += 1;
      } else if (place && place.start === index && place.end === index) {
        made.append(this.#place(place, index, index));
        at += 1;
      } else {
        made.append(...this.#made(index));
        index += 1;
      }
    }
    list.replaceChildren(made);
    withoutLastBreak(list);
    list.style.minHeight = "";
    list.removeAttribute("aria-busy");
    chunk.isDrawn = true;
    if (this.current !== null && this.current >= start && this.current < end) this.#setCurrent(this.current);
    else list.querySelector(".token")?.setAttribute("tabindex", "0");
    if (had) this.#token(this.current)?.focus({ preventScroll: true });
  }

  /** Return the nodes of a token. A line end at its end becomes a node of its own: so the token's frame stays on one line. */
  #made(index) {
    const token = tokenElement(this.about(index), this.colours);
    const last = token.lastChild;
    if (last.nodeType !== Node.TEXT_NODE || last.data !== "\n") return [token];
    last.remove();
    return [token, last];
  }

  #place(place, from, until) {
    const tokens = [];
    for (let index = from; index < until; index += 1) tokens.push(...this.#made(index));
    return placeElement(place, from, tokens);
  }

  #spanOf(index) {
    const { spans } = this.branch;
    let low = 0;
    let high = spans.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].end <= index) low = middle + 1;
      else high = middle;
    }
    return spans[low];
  }

  #token(index) {
    return this.parent.querySelector(`.token[data-index="${index}"]`);
  }

  #setCurrent(index) {
    const token = this.#token(index);
    if (!token) return;
    const list = token.closest(".chunk");
    for (const other of list.querySelectorAll('.token[tabindex="0"]')) other.tabIndex = -1;
    this.parent.querySelector('[aria-selected="true"]')?.removeAttribute("aria-selected");
    token.tabIndex = 0;
    token.setAttribute("aria-selected", "true");
    this.current = index;
  }

  #attend(target) {
    const token = tokenOf(target);
    if (!token) {
      this.#leave();
      return;
    }
    const index = Number(token.dataset.index);
    if (document.activeElement === token) this.#setCurrent(index);
    this.show(token, this.about(index));
  }

  #leave() {
    const focused = tokenOf(document.activeElement);
    if (focused) this.show(focused, this.about(Number(focused.dataset.index)));
    else this.hide();
  }

  #key(event) {
    const token = tokenOf(event.target);
    if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
    const index = Number(token.dataset.index);
    const chunk = token.closest(".chunk").chunk;
    const section = token.closest(".part").querySelectorAll(".chunk");
    const moves = {
      ArrowRight: () => this.focus(index + 1),
      ArrowLeft: () => this.focus(index - 1),
      ArrowDown: () => this.#toLine(token, chunk, 1),
      ArrowUp: () => this.#toLine(token, chunk, -1),
      Home: () => this.focus(section[0].chunk.start),
      End: () => this.focus(section[section.length - 1].chunk.end - 1),
      Escape: () => this.hide(),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  /** Move the focus to the nearest token of the next line (`step` 1), or of the line before (-1). */
  async #toLine(token, chunk, step) {
    const from = token.getClientRects()[0];
    const middle = from.left + Math.min(from.width, 40) / 2;
    let best = null;
    let line = null;
    for (let index = Number(token.dataset.index) + step; index >= 0 && index < this.branch.tokens; index += step) {
      let other = this.#token(index);
      if (!other) {
        if (best) break;
        const beyond = this.chunks.find((one) => index < one.end);
        if (!(await this.#drawn(beyond))) return;
        other = this.#token(index);
      }
      const box = other.getClientRects()[0];
      if (!box || Math.abs(box.top - from.top) < from.height / 2) continue;
      line ??= box;
      if (Math.abs(box.top - line.top) > line.height / 2) break;
      const distance = Math.abs(box.left + box.width / 2 - middle);
      if (best === null || distance < best.distance) best = { index, distance };
    }
    if (best) this.focus(best.index);
  }
}

function tokenOf(target) {
  return target instanceof Element ? target.closest(".token") : null;
}
