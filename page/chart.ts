// One chart with hover values and zoom, drawn by uPlot.
/*! Contains uPlot, copyright (c) 2022 Leon Sorokin, MIT License: github.com/leeoniya/uPlot */
import uPlot from "uplot";
import { Curve, curves, singleOf } from "./curves";
import { el, short, svg } from "./dom";
import { Chart, Data, View } from "./report_data";

const dark = matchMedia("(prefers-color-scheme: dark)");
const PALE_AT_MOST = 4;

const css = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A count with its unit, as in 1.5M. */
export function count(value: number): string {
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]] as const)
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(4))}${unit}`;
  return String(Number(value.toPrecision(4)));
}

/** A small picture of a line, as it is drawn. */
export function swatch(color: string, dash: number[], marks = false): SVGElement {
  const line = marks ? svg("circle", { cx: 13, cy: 5, r: 3.5, fill: "none", stroke: color, "stroke-width": 1.6 })
    : svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: color, "stroke-width": 2.2, "stroke-dasharray": dash.join(" ") });
  return svg("svg", { viewBox: "0 0 26 10", class: "swatch", "aria-hidden": "true" }, line);
}

/** Where a logarithmic axis has numbers: at powers of ten, at 2 and 5 too, or evenly where few of these are seen. */
function logTicks(low: number, high: number): number[] {
  const powers = Array.from({ length: Math.ceil(Math.log10(high / low)) + 2 }, (_, i) => 10 ** (Math.floor(Math.log10(low)) + i));
  const inside = (values: number[]) => values.map((value) => Number(value.toPrecision(3))).filter((value) => value >= low && value <= high);
  const step = Math.max(...powers.flatMap((power) => [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1].map((part) => part * power))
    .filter((size) => 3 * size <= high - low));
  const even = Array.from({ length: Math.floor(high / step) }, (_, i) => (i + 1) * step);
  return [powers, powers.flatMap((power) => [power, 2 * power, 5 * power])].map(inside).find((ticks) => ticks.length >= 3) ?? inside(even);
}

export class Plot {
  readonly root: HTMLElement;
  private readonly area = el("div", { class: "area", tabindex: 0, role: "group" });
  private readonly readout = el("div", { class: "readout", role: "status" });
  private readonly unit = el("span");
  private plot: uPlot | null = null;
  private shown: Curve[] = [];

  constructor(
    readonly chart: Chart, readonly data: Data, readonly view: View, readonly zoom: (range: [number, number] | null) => void
  ) {
    this.area.setAttribute("aria-label", `${chart.title}; the arrow keys read it off, Escape shows all`);
    this.area.addEventListener("keydown", (event) => this.key(event));
    this.root = el("figure", { class: "chart", "data-chart": chart.key },
      el("h3", {}, chart.title, " ", this.unit), this.area, this.readout, el("figcaption", {}, chart.caption));
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.area);
  }

  private size(): { width: number; height: number } {
    const first = this.data.charts[0] === this.chart;
    return { width: this.area.clientWidth, height: first ? Math.max(260, Math.min(460, innerHeight * 0.5)) : 230 };
  }

  draw(): void {
    this.plot?.destroy();
    this.shown = curves(this.chart, this.data, this.view, dark.matches);
    const bits = this.chart.loss && this.view.bits;
    const of = this.chart.single && this.data.groups.length > 1 ? `${this.data.groups[singleOf(this.chart, this.view)].name}, ` : "";
    const unit = bits ? this.chart.y.replace("nats per token", "bits per byte") : this.chart.y;
    this.unit.textContent = unit === this.chart.title.toLowerCase() ? "" : `(${of}${unit})`;
    const series: uPlot.Series[] = [{}];
    const tables: uPlot.AlignedData[] = [];
    const bands: uPlot.Band[] = [];
    const add = (x: number[], y: (number | null)[], look: uPlot.Series) => {
      series.push({ ...look });
      tables.push([x, y] as uPlot.AlignedData);
    };
    const pale = this.shown.filter((curve) => curve.raw).length <= PALE_AT_MOST;
    for (const curve of this.shown) {
      if (curve.raw && pale) add(curve.x, curve.raw, { stroke: curve.color, width: 0.6, alpha: 0.4, points: { show: false } });
      if (curve.low && curve.high) {
        bands.push({ series: [series.length + 1, series.length], fill: curve.color.replace(/^rgb\((.*)\)$/, "rgb($1 / 15%)").replace(/^#(......)$/, "#$126") });
        add(curve.x, curve.low, { stroke: "transparent", points: { show: false } });
        add(curve.x, curve.high, { stroke: "transparent", points: { show: false } });
      }
    }
    const few = this.shown.every((curve) => curve.x.length <= 40);
    for (const curve of this.shown) {
      add(curve.x, curve.y, curve.marks
        ? { stroke: curve.color, paths: () => null, points: { show: true, size: 7, stroke: curve.color, fill: css("--card"), width: 1.5 } }
        : { stroke: curve.color, width: 1.8, dash: curve.dash, points: { show: few, size: 5, fill: curve.color } });
    }
    const drawn = this.shown.length ? uPlot.join(tables) : ([[]] as unknown as uPlot.AlignedData);
    this.plot = new uPlot({ ...this.size(), series, bands, legend: { show: false }, ...this.options() }, drawn, this.area);
    this.read(null);
  }

  private options(): Pick<uPlot.Options, "scales" | "axes" | "cursor" | "hooks"> {
    const axis: uPlot.Axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 0.6 }, ticks: { stroke: css("--line"), width: 0.6 } };
    const whole = this.chart.lines.flatMap((line) => line.x);
    const counted = this.chart.x.startsWith("loop");
    const [from, to] = this.xRange(whole);
    const [low, high] = this.yRange(from, to);
    return {
      scales: {
        x: { time: false, range: [from, to] },
        y: { distr: this.chart.log ? 3 : 1, range: () => [low, high] },
      },
      axes: [
        { ...axis, label: this.chart.x, labelSize: 20, size: 34, labelFont: "12px system-ui",
          ...(counted ? { incrs: [1, 2, 5, 10, 20, 50] } : {}), values: (_, ticks) => ticks.map(count) },
        { ...axis, size: 58, ...(this.chart.log ? { splits: logTicks(low, high), filter: (_, ticks) => ticks } : {}), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) },
      ],
      cursor: {
        sync: { key: this.chart.x, scales: ["x", null] }, drag: { x: true, y: false, setScale: false },
        dataIdx: (plot, index, near) => nearest(plot.data[index], near),
        bind: { dblclick: () => () => { this.zoom(null); return null; } },
      },
      hooks: {
        setCursor: [(plot) => this.read(plot.cursor.idx ?? null)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width > 4) this.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
        }],
      },
    };
  }

  private xRange(whole: number[]): [number, number] {
    const [from, to] = [least(whole), most(whole)];
    if (this.view.range && this.chart.x === "training tokens") return this.view.range;
    const room = this.chart.noisy ? 0 : 0.03 * (to - from);
    return from === to ? [from - 1, to + 1] : [from - room, to + room];
  }

  /** The values that are seen, with some room; the fall at the beginning, which would flatten all that follows, is left out. */
  private yRange(from: number, to: number): [number, number] {
    const start = this.chart.noisy && this.view.range === null ? from + 0.1 * (to - from) : from;
    const inside = (begin: number) => this.shown.flatMap(({ x, y, low, high }) => [y, ...(low && high ? [low, high] : [])]
      .flatMap((values) => values.filter((value, i): value is number => value !== null && x[i] >= begin && x[i] <= to)));
    let values = inside(start);
    if (values.length < 2) values = inside(from);
    if (this.chart.log) values = values.filter((value) => value > 0);
    if (!values.length) return [0.1, 1];
    const [low, high] = [least(values), most(values)];
    if (this.chart.log) return [low / 1.1, high * 1.1];
    const room = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }

  /** The values at the cursor, or the last ones. */
  private read(index: number | null): void {
    const at = index === null ? Infinity : this.plot!.data[0][index];
    const items = this.shown.map((curve) => {
      const place = closest(curve.x, curve.y, at);
      const value = place < 0 ? null : curve.y[place];
      const half = place < 0 || !curve.high ? null : curve.high[place];
      const interval = value === null || half === null || half === undefined ? "" : ` ± ${short(half - value)}`;
      const bits = curve.bits && value !== null && !this.view.bits ? ` (${(value * curve.bits).toFixed(4)} bits/byte)` : "";
      const nats = curve.bits && value !== null && this.view.bits ? ` (${(value / curve.bits).toFixed(4)} nats)` : "";
      const text = value === null ? "–" : this.chart.loss ? value.toFixed(4) : short(value);
      return el("span", { class: "item" }, swatch(curve.color, curve.dash, curve.marks), el("bdi", {}, curve.name), " ",
        el("b", {}, `${text}${interval}`), bits + nats);
    });
    const where = index === null ? "last" : `${count(at)} ${this.chart.x}`;
    this.readout.replaceChildren(el("span", { class: "where" }, where), ...items);
  }

  private key(event: KeyboardEvent): void {
    const plot = this.plot!;
    if (event.key === "Escape") return this.zoom(null);
    const x = plot.data[0];
    const [first, last] = [plot.scales.x.min!, plot.scales.x.max!];
    const inside = Array.from(x.keys()).filter((i) => x[i] >= first && x[i] <= last);
    const now = inside.indexOf(plot.cursor.idx ?? -1);
    const stride = Math.max(1, Math.round(inside.length / 100));
    const steps: Record<string, number> = {
      ArrowLeft: (now < 0 ? inside.length : now) - stride, ArrowRight: now + stride, Home: 0, End: inside.length - 1,
    };
    if (!(event.key in steps) || !inside.length) return;
    event.preventDefault();
    const to = inside[Math.min(inside.length - 1, Math.max(0, steps[event.key]))];
    // The last argument, which uPlot's types leave out, moves the cursor of the other charts too.
    (plot.setCursor as (at: object, fire: boolean, publish: boolean) => void)(
      { left: plot.valToPos(x[to], "x"), top: plot.bbox.height / devicePixelRatio / 2 }, true, true);
  }
}

const least = (values: number[]) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values: number[]) => values.reduce((a, b) => Math.max(a, b), -Infinity);

/** The place of a known value that is nearest to `index`: lines need not have a point at every x. */
function nearest(values: uPlot.TypedArray | (number | null | undefined)[], index: number): number {
  for (let reach = 0; reach < values.length; reach++) {
    if (values[index - reach] != null) return index - reach;
    if (values[index + reach] != null) return index + reach;
  }
  return index;
}

function closest(x: number[], y: (number | null)[], at: number): number {
  let found = -1;
  x.forEach((value, i) => {
    if (y[i] !== null && (found < 0 || Math.abs(value - at) <= Math.abs(x[found] - at))) found = i;
  });
  return found;
}

export const onScheme = (redraw: () => void) => dark.addEventListener("change", redraw);
export const isDark = () => dark.matches;
