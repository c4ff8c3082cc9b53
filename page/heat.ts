// Shares as a table of shaded cells: right answers by hops, a row for each variant.
import { darken, el, percent } from "./dom";
import { Data, Heat, View } from "./report_data";

export function heat(plot: Heat, data: Data, view: View): HTMLElement {
  const rows = plot.rows.filter((row) => !view.hidden.includes(data.groups[row.group].name));
  const table = el("table", { class: "heat" },
    el("tr", {}, el("th", {}), ...plot.columns.map((name) => el("th", { scope: "col" }, name))),
    ...rows.map(({ group, values, borders }) => el("tr", {}, el("th", { scope: "row" }, el("bdi", {}, data.groups[group].name)),
      ...values.map((value, column) => {
        const cell = el("td", { title: percent(value) }, value === null ? "–" : String(Math.round(100 * value)));
        darken(cell, value ?? 0);
        borders.forEach((after, i) => cell.classList.toggle(`border${i}`, after === column + 1));
        return cell;
      }))));
  return el("figure", { class: "chart" }, el("h3", {}, plot.title),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": plot.title }, table), el("p", { class: "note" }, plot.caption));
}
