// Differences with their intervals, a row for each, as figures of studies have them.
import { onPaper } from "./curves";
import { isDark } from "./chart";
import { el, short, svg } from "./dom";
import { Data, Forest, View } from "./report_data";

const WIDTH = 300;

export function forest(plot: Forest, data: Data, view: View): HTMLElement {
  const rows = plot.rows.filter((row) => !view.hidden.includes(data.groups[row.group].name));
  const ends = rows.flatMap(({ mean, half, values }) => [mean - (half ?? 0), mean + (half ?? 0), ...values]);
  const [low, high] = [Math.min(0, ...ends), Math.max(0, ...ends)];
  const x = (value: number) => 6 + ((value - low) / (high - low || 1)) * (WIDTH - 12);
  const table = el("table", { class: "forest" }, ...rows.map(({ group, mean, half, values }) => {
    const color = onPaper(data.groups[group].color, isDark());
    const sign = (value: number) => (value > 0 ? "+" : "") + short(value);
    const text = sign(mean) + (half === null ? "" : ` ± ${short(half)}`);
    const bar = svg("line", { x1: x(mean - (half ?? 0)), x2: x(mean + (half ?? 0)), y1: 9, y2: 9, stroke: color, "stroke-width": 2 });
    const seeds = values.map((value) => svg("circle", { cx: x(value), cy: 17, r: 2.2, fill: color, opacity: 0.55 }, svg("title", {}, sign(value))));
    return el("tr", {}, el("th", { scope: "row" }, el("bdi", {}, data.groups[group].name)),
      el("td", {}, svg("svg", { viewBox: `0 0 ${WIDTH} 22`, role: "img", "aria-label": text },
        svg("line", { x1: x(0), x2: x(0), y1: 0, y2: 22, class: "zero" }), bar,
        svg("circle", { cx: x(mean), cy: 9, r: 4, fill: color }, svg("title", {}, text)), ...seeds)),
      el("td", { class: "value" }, text));
  }));
  return el("figure", { class: "chart" }, el("h3", {}, plot.title), el("div", { class: "scroll" }, table),
    el("p", { class: "note" }, `${plot.x}. ${plot.caption}`));
}
