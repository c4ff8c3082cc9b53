// What the cells of the grid can be shaded by.
import { Data, Model } from "./data";
import { percent, short } from "./dom";

export interface Shade {
  title: string;
  /** The number of a cell, or null where there is none. */
  value(model: Model, row: number, token: number): number | null;
  show(value: number | null): string;
  /** How dark a value is, from 0 to 1. */
  dark(value: number, low: number, high: number): number;
  /** Whether two models beside each other share the scale, because their numbers mean the same. */
  shared?: boolean;
  /** What the lightest and the darkest cell mean, of the least and the largest number. */
  ends(low: number, high: number): [string, string];
}

const between = (value: number, low: number, high: number) => (high > low ? (value - low) / (high - low) : 0.5);
/** Probabilities are shaded up to the largest on the page, or a quarter: unsure models stay pale, but not white. */
const topOf = (high: number) => Math.max(high, 0.25);
const ofLargest = (value: number, _: number, high: number) => value / topOf(high);
const upToLargest = (_: number, high: number): [string, string] => ["0%", percent(topOf(high))];
const mean = (list: (number | null)[]) => list.reduce((sum: number, each) => sum + (each ?? 0), 0) / list.length;

/** A quantity of a cell; of one per stream, the mean. */
export function cellOf(values: Model["quantities"][0]["values"], row: number, token: number): number | null {
  const cell = values[row]?.[token] ?? null;
  return Array.isArray(cell) ? mean(cell) : cell;
}

/** The number of each cell of a model's grid. */
export const numbersOf = (shade: Shade, model: Model): (number | null)[][] =>
  model.rows.map((_, row) => model.lens.top[row].map((_, token) => shade.value(model, row, token)));

/** The least and the largest number that a shade has in these models. */
export function rangeOf(shade: Shade, models: Model[]): [number, number] {
  const known = models.flatMap((model) => numbersOf(shade, model).flat()).filter((value): value is number => value !== null);
  return [Math.min(...known), Math.max(...known)];
}

export function shades(data: Data): Record<string, Shade> {
  const found: Record<string, Shade> = {
    probability: {
      title: "probability of the top prediction",
      value: (model, row, token) => model.lens.probability[row][token][0],
      show: percent, dark: ofLargest, ends: upToLargest, shared: true,
    },
    true: {
      title: "probability of the true next token",
      value: (model, row, token) => model.lens.true[row][token],
      show: percent, dark: ofLargest, ends: upToLargest, shared: true,
    },
    rank: {
      title: "rank of the true next token",
      value: (model, row, token) => model.lens.rank[row][token],
      show: (value) => (value === null ? "–" : `#${value}`),
      dark: (value, _, high) => 1 - between(Math.log(value), 0, Math.log(high)), ends: (_, high) => [`#${high}`, "#1"], shared: true,
    },
    kl: {
      title: "KL divergence to the last loop (nats)",
      value: (model, row, token) => model.lens.kl[row][token],
      show: short, dark: (value, low, high) => between(Math.sqrt(value), Math.sqrt(low), Math.sqrt(high)),
      ends: (low, high) => [short(low), short(high)], shared: true,
    },
  };
  for (const { key, title } of data.models.flatMap((model) => model.quantities)) {
    found[key] ??= {
      title,
      value: (model, row, token) => {
        const quantity = model.quantities.find((each) => each.key === key);
        return quantity ? cellOf(quantity.values, row, token) : null;
      },
      show: short, dark: between, ends: (low, high) => [short(low), short(high)],
    };
  }
  return found;
}
