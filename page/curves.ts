// From the lines of a chart to what is drawn: smoothed, averaged over seeds, in the unit and the color that are asked for.
import { Chart, Data, Group, Line, View } from "./report_data";

export interface Curve {
  name: string; color: string; dash: number[]; marks: boolean;
  x: number[]; y: (number | null)[];
  raw?: (number | null)[]; low?: (number | null)[]; high?: (number | null)[];
  bits: number | null;
}

/** The mean over a window, weighted as by Hann, which shifts nothing; what is missing is left out. As reporting/plots.py does. */
export function smooth(values: (number | null)[], percent: number): (number | null)[] {
  const reach = Math.floor((values.length * percent) / 200);
  if (!percent || !reach) return values;
  const weights = Array.from({ length: 2 * reach + 1 }, (_, i) => 0.5 - 0.5 * Math.cos((Math.PI * (i + 1)) / (reach + 1)));
  return values.map((_, at) => {
    let [sum, mass] = [0, 0];
    for (let i = Math.max(0, at - reach); i <= Math.min(values.length - 1, at + reach); i++) {
      const value = values[i];
      if (value === null) continue;
      sum += weights[i - at + reach] * value;
      mass += weights[i - at + reach];
    }
    return mass ? sum / mass : null;
  });
}

/** A color of the palette, which was made for white paper, light enough for a dark one. */
export function onPaper(color: string, dark: boolean): string {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16) / 255);
  if (!dark) return color;
  const [most, least] = [Math.max(r, g, b), Math.min(r, g, b)];
  const light = (most + least) / 2;
  const gray = most - least < 0.05;
  const target = gray ? Math.max(1 - light, 0.62) : Math.max(light, 0.62);
  // Toward white, which keeps the hue.
  const share = light < 1 ? Math.max(0, (target - light) / (1 - light)) : 0;
  return `rgb(${[r, g, b].map((part) => Math.round(255 * (part + (1 - part) * share))).join(" ")})`;
}

const ORDERED = ["#440154", "#414487", "#2a788e", "#22a884", "#7ad151"];
/** The same order on dark paper, where shades that were made light would look alike. */
const ORDERED_ON_DARK = ["#d59be6", "#8f9bf2", "#4fb9d8", "#45cf9a", "#d3e15c"];

function ordered(index: number, count: number, dark: boolean): string {
  return (dark ? ORDERED_ON_DARK : ORDERED)[count < 2 ? 0 : Math.round((index / (count - 1)) * (ORDERED.length - 1))];
}

function mean(values: (number | null)[][], at: number): [number | null, number] {
  const known = values.map((each) => each[at]).filter((value): value is number => value !== null && value !== undefined);
  if (known.length < values.length) return [null, 0];
  const middle = known.reduce((a, b) => a + b, 0) / known.length;
  const spread = Math.sqrt(known.reduce((sum, value) => sum + (value - middle) ** 2, 0) / Math.max(1, known.length - 1));
  return [middle, spread];
}

const times = (values: (number | null)[], factor: number) => values.map((value) => (value === null ? null : value * factor));
const minus = (a: (number | null)[], b: (number | null)[], sign: number) =>
  a.map((value, i) => (value === null || b[i] === null ? null : value + sign * b[i]!));

/** Of seeds, the mean and its interval, each seed smoothed for itself; of a single line, the line. */
function curve(chart: Chart, group: Group, lines: Line[], data: Data, view: View): Omit<Curve, "color" | "dash" | "name"> {
  const [first] = lines;
  const factor = chart.loss && view.bits && group.bits ? group.bits : 1;
  const percent = chart.noisy && !first.marks ? view.smoothing : 0;
  const shared = { x: first.x, marks: first.marks ?? false, bits: chart.loss ? group.bits : null };
  if (lines.length === 1) {
    const y = times(smooth(first.y, percent), factor);
    const half = first.half ? times(first.half, factor) : null;
    return { ...shared, y, raw: percent ? times(first.y, factor) : undefined,
      low: half ? minus(y, half, -1) : undefined, high: half ? minus(y, half, 1) : undefined };
  }
  const each = lines.map((line) => smooth(line.y, percent));
  const points = first.x.map((_, at) => mean(each, at));
  const y = times(points.map(([middle]) => middle), factor);
  const half = points.map(([, spread]) => factor * spread * data.student[lines.length]);
  return { ...shared, y, low: minus(y, half, -1), high: minus(y, half, 1) };
}

/** The curves of a chart as the reader has chosen. */
export function curves(chart: Chart, data: Data, view: View, dark: boolean): Curve[] {
  const shown = chart.single
    ? chart.lines.filter((line) => line.group === singleOf(chart, view))
    : chart.lines.filter((line) => !view.hidden.includes(data.groups[line.group].name));
  const parts = [...new Set(shown.map((line) => line.part))];
  const several = new Set(shown.map((line) => line.group)).size > 1;
  const kinds = [...new Set(shown.map((line) => `${line.group} ${line.part}`))];
  return kinds.map((kind) => {
    const lines = shown.filter((line) => `${line.group} ${line.part}` === kind);
    const group = data.groups[lines[0].group];
    const place = parts.indexOf(lines[0].part);
    const look = chart.single ? { color: ordered(place, parts.length, dark), dash: [] } : { color: onPaper(group.color, dark), dash: group.dash };
    const name = chart.single || chart.named || !several ? lines[0].part || group.name : [group.name, lines[0].part].filter(Boolean).join(", ");
    return { ...curve(chart, group, lines, data, view), name, ...look };
  });
}

/** The group that a chart of one shows: the chosen one, or the first that it knows. */
export function singleOf(chart: Chart, view: View): number {
  return chart.lines.some((line) => line.group === view.single) ? view.single : chart.lines[0].group;
}
