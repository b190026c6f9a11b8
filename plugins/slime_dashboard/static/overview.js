// The first page: it asks for data every few seconds, and for the sessions every third time.

import { age, amount, bytes, count, counted, duration, share } from "./format.js";
import { Plot } from "./plots.js";
import { SessionTable } from "./sessions.js";
import { element, getData, poll, setStatus } from "./shell.js";

const INTERVAL = 5000;
/** Samples that are kept: one hour. */
const KEPT = 720;
/** One poll of this many also asks for the sessions. */
const SESSIONS_EVERY = 3;

const byId = (id) => document.getElementById(id);
const columns = { time: [] };
let overview = null;
let polls = 0;

const seconds = { format: duration };
const PLOTS = [
  {
    title: "Requests per second", unit: "per second", format: amount,
    series: [
      { name: "succeeded", label: "succeeded (2xx)", stroke: "--series-1" },
      { name: "refused", label: "refused (4xx)", stroke: "--series-2", dash: [6, 3] },
      { name: "failed", label: "failed (5xx) or broken off", stroke: "--series-bad", dash: [2, 2] },
    ],
  },
  {
    title: "Tokens per second", unit: "per second", format: amount, empty: "No tokens counted in this period",
    series: [
      { name: "sampled_tokens", label: "sampled", stroke: "--series-1" },
      { name: "prompt_tokens", label: "of prompts", stroke: "--series-3", dash: [6, 3] },
    ],
  },
  {
    title: "Requests in flight", unit: "requests", format: amount,
    series: [
      { name: "in_flight", label: "in flight", stroke: "--series-1" },
      { name: "waiting", label: "waiting for a slot or a pause", stroke: "--series-2", dash: [6, 3] },
    ],
  },
  {
    title: "Time to the first byte of a stream", unit: "quantile", ...seconds, empty: "No streams in this period",
    series: [
      { name: "first_p50", label: "p50", stroke: "--series-3" },
      { name: "first_p95", label: "p95", stroke: "--series-4", dash: [6, 3] },
    ],
  },
  {
    title: "Time to the end of an answer", unit: "quantile", ...seconds,
    series: [
      { name: "whole_p50", label: "p50", stroke: "--series-3" },
      { name: "whole_p95", label: "p95", stroke: "--series-4", dash: [6, 3] },
    ],
  },
  {
    title: "Cache hit rate", unit: "share of prompts", format: share, top: 1, empty: "No prompts counted in this period",
    series: [{ name: "hit_rate", label: "prompts with known tokens", stroke: "--series-1" }],
  },
]; // prettier-ignore
let plots = null;

const sessions = new SessionTable();

function extend(history) {
  for (const [name, values] of Object.entries(history)) {
    columns[name] = [...(columns[name] ?? []), ...values].slice(-KEPT);
  }
}

function showTiles({ fleet, weights, paused, waiting, slots, history }) {
  const last = (name) => columns[name]?.at(-1);
  const inFlight = last("in_flight");
  const set = fleet.total - fleet.ready;
  const queued = (waiting.slot ?? 0) + (waiting.pause ?? 0);
  const tiles = [
    ["Workers ready", `${count(fleet.ready)} / ${count(fleet.total)}`, paused ? "generation is paused" : set ? `${counted(set, "worker")} held back` : fleet.total ? "all get requests" : "none registered", paused || set || !fleet.total ? "warn" : "ok"],
    ["Weight version", weights.version ?? "unknown", weights.age_s === null ? "no update seen" : `for ${age(weights.age_s)}`],
    ["Requests", `${amount(sum(last("succeeded"), last("refused"), last("failed")))} / s`, last("failed") ? `${amount(last("failed"))} / s failed` : "none failed", last("failed") ? "bad" : "ok"],
    ["In flight", count(inFlight), queued ? `${count(queued)} waiting` : slots.limit === null ? "none waiting" : `${count(slots.held)} of ${count(slots.limit)} slots`, queued ? "warn" : "ok"],
    ["Sampled tokens", `${amount(last("sampled_tokens"))} / s`, `${amount(last("prompt_tokens"))} / s of prompts`],
    ["Whole answer, p95", duration(latest("whole_p95")), `p50 ${duration(latest("whole_p50"))}`],
  ];
  byId("tiles").replaceChildren(
    ...(history === null ? tiles.slice(0, 2) : tiles).map(([name, value, detail, kind]) =>
      element("div", { class: "tile", dataset: { kind: kind ?? "ok" } }, element("dt", {}, name), element("dd", {}, value), element("dd", { class: "detail" }, detail)),
    ),
  );
}

const sum = (...numbers) => (numbers.every((number) => number === null || number === undefined) ? null : numbers.reduce((total, number) => total + (number ?? 0), 0));

/** The last known number of a column within the last minute. */
const latest = (name) => columns[name]?.slice(-12).findLast((value) => value !== null);

const STATES = { ready: "ok", joining: "info", draining: "info", stale: "warn", quarantined: "bad" };
const BREAKERS = { closed: "ok", open: "bad", "half-open": "warn" };

function showWorkers({ fleet, weights }) {
  if (!fleet.total) {
    byId("workers").replaceChildren(
      element("p", { class: "note" }, "No worker is registered. Add one: ", element("code", {}, `curl -X POST '${location.origin}/add_worker?url=http://HOST:PORT'`)),
    );
    return;
  }
  const hasTypes = fleet.workers.some((worker) => worker.type !== "regular");
  const hasBreakers = fleet.workers.some((worker) => worker.breaker !== null);
  const most = Math.max(1, ...fleet.workers.map((worker) => worker.load));
  const heads = ["Worker", hasTypes && "Type", "State", "Held back by", "In flight", hasBreakers && "Breaker", "Weights"].filter(Boolean);
  const rows = fleet.workers.map((worker) => {
    const pill = (kind, text) => element("span", { class: "pill", dataset: { kind } }, text);
    const isOther = worker.weight_version !== null && worker.weight_version !== weights.version;
    const holds = worker.holds.map(([owner, reason]) => element("li", {}, element("strong", {}, `${owner}: `), reason));
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, element("bdi", { class: "url" }, worker.url)),
      hasTypes ? element("td", {}, worker.type) : null,
      element("td", {}, pill(STATES[worker.state] ?? "info", worker.state)),
      element("td", { class: "hold" }, holds.length ? element("ul", { class: "holds" }, holds) : element("span", { class: "muted" }, "nothing")),
      element("td", { class: "number" }, count(worker.load), bar(worker.load / most)),
      hasBreakers ? element("td", {}, pill(BREAKERS[worker.breaker] ?? "info", worker.breaker ?? "–")) : null,
      element("td", {}, isOther ? pill("warn", worker.weight_version) : (worker.weight_version ?? "unknown"), isOther ? " other than the fleet's" : null),
    );
  });
  const left = fleet.total - fleet.workers.length;
  byId("workers").replaceChildren(
    element(
      "table",
      {},
      left > 0 ? element("caption", {}, `${counted(fleet.workers.length, "worker")} of ${count(fleet.total)}, those that get no requests first`) : null,
      element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col", class: head === "In flight" ? "number" : null }, head)))),
      element("tbody", {}, rows),
    ),
  );
}

function bar(part, kind = "") {
  const filled = element("span");
  filled.style.width = `${Math.round(100 * Math.min(1, part || 0))}%`;
  return element("span", { class: "bar", dataset: { kind }, "aria-hidden": "true" }, filled);
}

function showCache({ cache }) {
  if (cache === null) return;
  const { hit = 0, miss = 0 } = cache.prompts;
  const { reused = 0, encoded = 0, given = 0 } = cache.tokens ?? {};
  const tokens = reused + encoded + given;
  const facts = [
    ["Prompts with known tokens", share(hit + miss ? hit / (hit + miss) : null), hit / (hit + miss)],
    ["Tokens of prompts taken from records", share(tokens ? reused / tokens : null), reused / tokens],
    ["Prompts", count(hit + miss)],
    ["Recorded tokens kept", count(cache.kept_tokens)],
    ["Memory", bytes(cache.kept_bytes)],
  ];
  byId("cache").replaceChildren(
    ...facts.flatMap(([name, value, part]) => [
      element("dt", {}, name),
      element("dd", {}, value),
      ...(part === undefined ? [] : [element("dd", { class: "whole", "aria-hidden": "true" }, bar(part, "ok"))]),
    ]),
  );
}

function showExactness({ exactness }) {
  if (exactness === null) return;
  const groups = [
    ["Sampled answers", "generated", "None sampled yet."],
    ["Retrieved answers", "retrieved", "None retrieved yet."],
    ["Generations passed on without their tokens", "untouched", "None."],
    ["Failures to record", "unrecorded", "None."],
  ];
  byId("exactness").replaceChildren(
    ...groups.map(([title, name, none]) => {
      const reasons = Object.entries(exactness[name] ?? {}).sort(([, one], [, other]) => other - one);
      const total = reasons.reduce((all, [, number]) => all + number, 0);
      const rows = reasons.map(([reason, number]) =>
        element(
          "tr",
          {},
          element("th", { scope: "row" }, reason.replaceAll("_", " ")),
          element("td", {}, bar(number / total, reason === "exact" ? "ok" : "bad")),
          element("td", { class: "number" }, count(number)),
          element("td", { class: "number" }, share(number / total)),
        ),
      );
      const heads = ["Reason", "", "Number", "Share"].map((head, place) =>
        head ? element("th", { scope: "col", class: place > 1 ? "number" : null }, head) : element("td"),
      );
      return element(
        "div",
        { class: "reasons" },
        element("h3", {}, title),
        rows.length ? element("table", {}, element("thead", {}, element("tr", {}, heads)), element("tbody", {}, rows)) : element("p", { class: "muted small" }, none),
      );
    }),
  );
}

function showPlots() {
  const isMissing = overview.history === null;
  byId("no-history").hidden = !isMissing;
  for (const id of ["plots", "period", "plots-note"]) byId(id).hidden = isMissing;
  if (isMissing) return;
  plots ??= PLOTS.map((plot) => new Plot(byId("plots"), plot));
  const to = columns.time.at(-1) ?? Date.now() / 1000;
  const from = to - Number(document.querySelector('input[name="period"]:checked').value);
  for (const plot of plots) plot.show(columns, from, to, overview.weights.updates);
}

function showState({ fleet, paused, waiting }) {
  byId("paused").hidden = !paused;
  const text = `Generation is paused: ${counted(waiting.pause ?? 0, "request")} waiting for it to continue.`;
  if (paused && byId("paused").textContent !== text) byId("paused").textContent = text;
  const isReady = fleet.total > 0 && fleet.ready === fleet.total;
  setStatus(paused || !isReady ? "warn" : "ok", paused ? "Generation is paused" : `${count(fleet.ready)} of ${counted(fleet.total, "worker")} ready`);
}

async function refresh() {
  overview = await getData("overview", { since: columns.time.at(-1) ?? 0 });
  if (overview.history !== null) extend(overview.history);
  const isRecorded = overview.cache !== null;
  byId("no-cache").hidden = isRecorded;
  byId("recorded").hidden = !isRecorded;
  byId("sessions-card").hidden = !isRecorded;
  showState(overview);
  showTiles(overview);
  showWorkers(overview);
  showPlots();
  showCache(overview);
  showExactness(overview);
  byId("about").textContent = `slime-router ${overview.version}, up for ${age(overview.uptime_s)}. The router takes a sample every ${overview.interval_s} s. This page asks for new samples every ${INTERVAL / 1000} s while it is visible.`;
  if (isRecorded && (polls % SESSIONS_EVERY === 0 || sessions.isDue)) await sessions.load();
  polls += 1;
}

const refreshNow = poll(refresh, INTERVAL);
sessions.onchange = refreshNow;
byId("period").addEventListener("change", () => overview && showPlots());
