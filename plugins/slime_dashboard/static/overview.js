import { element, getData, poll, setStatus } from "./shell.js";

const INTERVAL = 5000;

poll(async () => {
  const { fleet } = await getData("overview");
  const rows = fleet.workers.map((worker) =>
    element("tr", {}, element("th", { scope: "row" }, worker.url), element("td", {}, worker.state)),
  );
  const head = element("tr", {}, element("th", { scope: "col" }, "Worker"), element("th", { scope: "col" }, "State"));
  document
    .getElementById("fleet")
    .replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, rows)));
  setStatus(fleet.ready ? "ok" : "warn", `${fleet.ready} of ${fleet.total} workers ready`);
}, INTERVAL);
