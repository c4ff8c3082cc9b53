// What reporting/page.py packs into a report.
import { Equation } from "./data";

/** What can be switched on and off: a run, or all runs of a variant. */
export interface Group { name: string; color: string; dash: number[]; bits: number | null }

export interface Line {
  group: number;
  /** Which line of its group: "training", "validation", "loop 2"; lines of one part are seeds, of which the mean is drawn. */
  part: string;
  x: number[];
  y: (number | null)[];
  /** Half of an interval around each point, where it is known already. */
  half?: (number | null)[];
  /** Drawn as marks, and never smoothed. */
  marks?: boolean;
}

export interface Chart {
  key: string; title: string; caption: string; x: string; y: string;
  log: boolean;
  /** Whether single points are noisy, and the beginning far from the rest. */
  noisy: boolean;
  /** Whether it is a loss, which bits per byte are made of. */
  loss: boolean;
  /** Whether the name of a part says it all, without that of its group. */
  named: boolean;
  /** Whether groups would hide each other, so that one is shown at a time, its parts told apart by color. */
  single: boolean;
  lines: Line[];
}

/** A mean with the ends of its interval, and what it is a mean of. */
export interface Interval { group: number; mean: number; low: number | null; high: number | null; values: number[] }
/** Intervals, a row each; `marks` are the values of vertical lines, and `signed` ones are differences. */
export interface Forest { title: string; caption: string; x: string; marks: number[]; signed: boolean; rows: Interval[] }
/** Shares, a row for each group; the borders of a row stand after so many columns. */
export interface Heat { title: string; caption: string; columns: string[]; rows: { group: number; values: (number | null)[]; borders: number[] }[] }
export interface Sample { step: number; tokens: number; text: string }
export interface Samples { group: number; prompt: string; texts: Sample[] }
export interface Cell { text: string; sub: string; sup: string; mark: "bold" | "underline" | null }
export interface Table { title: string; header: Cell[]; rows: Cell[][]; notes: string[] }

export interface Data {
  title: string;
  /** Seconds after which the page is read again, while runs train. */
  watch: number | null;
  groups: Group[];
  charts: Chart[];
  forests: Forest[];
  heats: Heat[];
  equations: Equation[];
  samples: Samples[];
  tables: Table[];
  files: { name: string; text: string }[];
  notes: string[];
  /** Student's quantile over the root of the number of seeds, by that number. */
  student: Record<string, number>;
}

/** What the reader has chosen. */
export interface View {
  hidden: string[];
  /** Percent of the points that a mean is taken over. */
  smoothing: number;
  bits: boolean;
  range: [number, number] | null;
  single: number;
}
