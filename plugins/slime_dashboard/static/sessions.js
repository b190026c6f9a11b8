// The list of recorded sessions, newest first. Names come from clients: they are inserted as text, never as HTML.

import { count, counted } from "./format.js";
import { element, getData, pageAddress } from "./shell.js";

const byId = (id) => document.getElementById(id);
/** Weight versions that a row names. */
const VERSIONS = 4;

export class SessionTable {
  constructor() {
    this.offset = 0;
    this.search = "";
    this.size = 0;
    this.shown = "";
    /** True when the user has asked for other sessions. */
    this.isDue = true;
    this.onchange = () => {};
    byId("search").addEventListener("submit", (event) => {
      event.preventDefault();
      this.search = byId("query").value;
      this.go(0);
    });
    byId("newer").addEventListener("click", () => this.go(Math.max(0, this.offset - this.size)));
    byId("older").addEventListener("click", () => this.go(this.offset + this.size));
  }

  go(offset) {
    this.offset = offset;
    this.isDue = true;
    this.onchange();
  }

  async load() {
    this.isDue = false;
    const page = await getData("sessions", { offset: this.offset, search: this.search });
    const seen = JSON.stringify([page, this.offset, this.search]);
    if (seen === this.shown) return; // a focused link keeps the focus
    this.shown = seen;
    this.size = page.size;
    const focused = byId("sessions").contains(document.activeElement) ? document.activeElement.dataset.name : undefined;
    byId("sessions").replaceChildren(page.sessions.length ? table(page.sessions) : this.nothing(page));
    if (focused !== undefined) [...byId("sessions").querySelectorAll("a")].find((link) => link.dataset.name === focused)?.focus();
    byId("newer").disabled = this.offset === 0;
    byId("older").disabled = !page.has_more;
    byId("range").textContent = this.range(page);
  }

  nothing(page) {
    const text = this.search ? "No name contains this text." : page.total ? "There are no older sessions." : "No session is recorded yet. A request names its session by the header X-Session-Id, or by session_id in its body.";
    return element("p", { class: "muted" }, text);
  }

  range(page) {
    const { length } = page.sessions;
    const places = length ? `${count(this.offset + 1)} to ${count(this.offset + length)}` : "none";
    const cut = page.is_cut ? "; only the newest 100,000 names were searched" : "";
    return this.search ? `Matches ${places}, of ${counted(page.total, "session")} in all${cut}` : `${places} of ${counted(page.total, "session")}`;
  }
}

function table(sessions) {
  const heads = ["Session", "Responses", "Sampled tokens", "Weight versions", "Complete"];
  const hasViewer = document.querySelector('nav a[href$="trajectory"]') !== null;
  const rows = sessions.map((session) => {
    const name = element("bdi", {}, session.name);
    return element(
      "tr",
      {},
      element(
        "th",
        { scope: "row" },
        hasViewer ? element("a", { href: pageAddress("trajectory", { session: session.name }), dataset: { name: session.name } }, name) : name,
      ),
      element("td", { class: "number" }, count(session.responses)),
      element("td", { class: "number" }, count(session.tokens)),
      element("td", {}, versions(session.weight_versions)),
      element("td", {}, element("span", { class: "pill", dataset: { kind: session.complete ? "ok" : "warn" } }, session.complete ? "yes" : "no: some is lost")),
    );
  });
  const isNumber = new Set(["Responses", "Sampled tokens"]);
  return element(
    "table",
    {},
    element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col", class: isNumber.has(head) ? "number" : null }, head)))),
    element("tbody", {}, rows),
  );
}

function versions(names) {
  const shown = names.slice(-VERSIONS).map((name) => name ?? "unknown");
  return (names.length > VERSIONS ? "… → " : "") + shown.join(" → ");
}
