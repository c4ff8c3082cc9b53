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
  /** What the lightest and the darkest cell mean, of the least and the largest number. */
  ends(low: number, high: number): [string, string];
}

const between = (value: number, low: number, high: number) => (high > low ? (value - low) / (high - low) : 0.5);
const shares = (): [string, string] => ["0%", "100%"];
const mean = (list: (number | null)[]) => list.reduce((sum: number, each) => sum + (each ?? 0), 0) / list.length;

/** A quantity of a cell; of one per stream, the mean. */
export function cellOf(values: Model["quantities"][0]["values"], row: number, token: number): number | null {
  const cell = values[row]?.[token] ?? null;
  return Array.isArray(cell) ? mean(cell) : cell;
}

export function shades(data: Data): Record<string, Shade> {
  const found: Record<string, Shade> = {
    probability: {
      title: "probability of the top prediction",
      value: (model, row, token) => model.lens.probability[row][token][0],
      show: percent, dark: (value) => value, ends: shares,
    },
    true: {
      title: "probability of the true next token",
      value: (model, row, token) => model.lens.true[row][token],
      show: percent, dark: (value) => value, ends: shares,
    },
    rank: {
      title: "rank of the true next token",
      value: (model, row, token) => model.lens.rank[row][token],
      show: (value) => (value === null ? "–" : `#${value}`),
      dark: (value, _, high) => 1 - between(Math.log(value), 0, Math.log(high)), ends: (_, high) => [`#${high}`, "#1"],
    },
    kl: {
      title: "KL divergence to the last loop (nats)",
      value: (model, row, token) => model.lens.kl[row][token],
      show: short, dark: (value, low, high) => between(Math.sqrt(value), Math.sqrt(low), Math.sqrt(high)),
      ends: (low, high) => [short(low), short(high)],
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
