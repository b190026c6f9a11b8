// Plots of the history: uPlot draws them; a table below each has the same series in numbers.

import { element } from "./shell.js";

const HEIGHT = 180;
const sync = uPlot.sync("history");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A plot of some columns of the history. `series`: name of the column, label, and custom property of the colour. */
export class Plot {
  constructor(parent, { title, unit, series, format, top = null, empty = "No requests in this period" }) {
    this.series = series;
    this.format = format;
    this.title = title;
    this.top = top;
    this.updates = [];
    this.canvas = element("div", { class: "plot", role: "img", "aria-label": `${title}: no data yet` });
    this.empty = element("p", { class: "plot-empty" }, empty);
    this.rows = element("tbody");
    const heads = ["now", "mean", "max"].map((name) => element("th", { scope: "col", class: "number" }, name));
    const table = element(
      "table",
      { class: "legend" },
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, unit), heads)),
      this.rows,
    );
    parent.append(
      element(
        "figure",
        { class: "card figure" },
        element("figcaption", {}, element("h3", {}, title)),
        element("div", { class: "plot-area" }, this.canvas, this.empty),
        table,
      ),
    );
    this.drawn = new uPlot(this.options(), [[], ...series.map(() => [])], this.canvas);
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    document.documentElement.addEventListener("themechange", () => this.drawn.redraw(false, true));
  }

  options() {
    const axis = {
      stroke: () => colour("--muted"),
      grid: { stroke: () => colour("--grid"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    return {
      width: 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: sync.key }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { y: { range: (_, low, high) => [0, this.top ?? (high > 0 ? high * 1.1 : 1)] } },
      axes: [
        { ...axis, size: 30, gap: 6, space: 70, values: [[60, "{HH}:{mm}", null, null, null, null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] },
        { ...axis, size: 62, space: 36, values: (_, splits) => splits.map((value) => this.format(value)) },
      ],
      series: [
        {},
        ...this.series.map(({ label, stroke, dash }) => ({
          label,
          stroke: () => colour(stroke),
          width: 1.75,
          dash,
          spanGaps: false,
          points: { show: (plot, place) => isAlone(plot.data[place]) },
        })),
      ],
      hooks: { draw: [(plot) => this.drawUpdates(plot)] },
    };
  }

  /** Show `columns`, the samples from `from` on, and the weight `updates` in that time. */
  show(columns, from, to, updates) {
    this.updates = updates.filter(([time]) => time >= from);
    const first = columns.time.findIndex((time) => time >= from);
    const cut = (name) => (first < 0 ? [] : columns[name].slice(first));
    const values = this.series.map(({ name }) => cut(name));
    this.drawn.setData([cut("time"), ...values], false);
    this.drawn.setScale("x", { min: from, max: to });
    const known = values.map((column) => column.filter((value) => value !== null));
    this.empty.hidden = known.some((column) => column.length);
    this.rows.replaceChildren(...this.series.map((series, place) => this.row(series, values[place], known[place])));
    const told = this.series.map(({ label }, place) => `${label} ${this.numbers(values[place], known[place]).join(", ")}`);
    this.canvas.setAttribute(
      "aria-label",
      this.empty.hidden ? `${this.title}; now, mean and maximum: ${told.join("; ")}` : `${this.title}: no requests in this period`,
    );
  }

  numbers(column, known) {
    if (!known.length) return ["–", "–", "–"];
    const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    const now = column.at(-1);
    return [now === null || now === undefined ? "–" : this.format(now), this.format(mean), this.format(Math.max(...known))];
  }

  row({ label, stroke, dash }, column, known) {
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.borderTop = `3px ${dash ? "dashed" : "solid"} var(${stroke})`;
    const cells = this.numbers(column, known).map((text) => element("td", { class: "number" }, text));
    return element("tr", {}, element("th", { scope: "row" }, swatch, label), cells);
  }

  drawUpdates(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--control");
    ctx.fillStyle = colour("--muted");
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "top";
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    let free = -Infinity;
    for (const [time, version] of this.updates) {
      const x = plot.valToPos(time, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const text = version.length > 8 ? `${version.slice(0, 7)}…` : version;
      const end = x + 4 + ctx.measureText(text).width;
      if (x > free && end < bbox.left + bbox.width) {
        ctx.fillText(text, x + 4, bbox.top + 2);
        free = end + 4;
      }
    }
    ctx.restore();
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (width && width !== this.drawn.width) this.drawn.setSize({ width, height: HEIGHT });
  }
}

/** A line needs two neighbours; a lone value is a point. */
function isAlone(column) {
  return column.filter((value) => value !== null).length < 3;
}
