// Numbers with their intervals, a row for each, as figures of studies have them.
import { onPaper } from "./curves";
import { isDark } from "./chart";
import { el, short, svg } from "./dom";
import { Data, Forest, View } from "./report_data";

const WIDTH = 300;

/** An interval as half of its width, or as its ends where the mean is not in the middle. */
function interval(mean: number, low: number | null, high: number | null): string {
  if (low === null || high === null) return "";
  const [below, above] = [mean - low, high - mean];
  return Math.abs(above - below) <= 0.01 * (above + below) ? ` ±\u00a0${short((below + above) / 2)}` : ` (${short(low)} to ${short(high)})`;
}

export function forest(plot: Forest, data: Data, view: View): HTMLElement {
  const rows = plot.rows.filter((row) => !view.hidden.includes(data.groups[row.group].name));
  const ends = rows.flatMap(({ mean, low, high, values }) => [low ?? mean, high ?? mean, ...values]);
  const [least, most] = [Math.min(...plot.marks, ...ends), Math.max(...plot.marks, ...ends)];
  const x = (value: number) => 6 + ((value - least) / (most - least || 1)) * (WIDTH - 12);
  const table = el("table", { class: "forest" }, ...rows.map(({ group, mean, low, high, values }) => {
    const color = onPaper(data.groups[group].color, isDark());
    const sign = (value: number) => (plot.signed && value > 0 ? "+" : "") + short(value);
    const text = sign(mean) + interval(mean, low, high);
    const bar = svg("line", { x1: x(low ?? mean), x2: x(high ?? mean), y1: 9, y2: 9, stroke: color, "stroke-width": 2 });
    const seeds = values.map((value) => svg("circle", { cx: x(value), cy: 17, r: 2.2, fill: color, opacity: 0.55 }, svg("title", {}, sign(value))));
    return el("tr", {}, el("th", { scope: "row" }, el("bdi", {}, data.groups[group].name)),
      el("td", {}, svg("svg", { viewBox: `0 0 ${WIDTH} 22`, role: "img", "aria-label": text },
        ...plot.marks.map((at) => svg("line", { x1: x(at), x2: x(at), y1: 0, y2: 22, class: "zero" })), bar,
        svg("circle", { cx: x(mean), cy: 9, r: 4, fill: color }, svg("title", {}, text)), ...seeds)),
      el("td", { class: "value" }, text));
  }));
  return el("figure", { class: "chart" }, el("h3", {}, plot.title), el("div", { class: "scroll" }, table),
    el("p", { class: "note" }, `${plot.x}. ${plot.caption}`));
}
