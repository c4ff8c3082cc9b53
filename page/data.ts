// What reporting/look.py and reporting/recording.py pack into a look page.

export interface Equation {
  name: string; summary: string; rule: string; projection: string; target: string; objective: string;
  input_map: string; step: string; decay: string; start: string; readout: string; aligned: boolean;
  loop_specific: boolean; where: string[]; steps: number;
  /** The runs or variants it is the equation of, where others of its name have another. */
  of?: string[];
}

export interface Quantity {
  key: string; title: string; meaning: string;
  /** By row, then token, then, for some, stream. A start has none of what a step computes. */
  values: ((number | null | (number | null)[])[] | null)[];
}

export interface Visit { source: number[][]; weight: number[][] }
export interface Routing { chosen: number[][]; weight: number[][] }
export interface Layer { name: string; place: string; attention: Visit[]; experts: Routing[] }

/** What a depth policy looks at, by step and token, recorded at full depth. */
export interface Exit { signal: string; values: number[][] }

export interface Model {
  name: string;
  equations: Equation[];
  rows: { loop: number; step: number }[];
  lens: {
    top: number[][][]; probability: number[][][]; rank: (number | null)[][]; true: (number | null)[][];
    kl: number[][]; settles: number[];
  };
  quantities: Quantity[];
  layers: Layer[];
  exits: Exit[];
  /** Where tokens really left, if they were let out: what was recorded at full depth stays beside it. */
  left: { rule: string; depths: number[]; says: number[]; probability: number[] } | null;
}

/** The cell that everything on the page is about. */
export interface Cursor { token: number; row: number }

export interface Data { tokens: number[]; pieces: Record<string, string>; models: Model[] }

export function rowName(model: Model, row: number): string {
  const { loop, step } = model.rows[row];
  const of = model.equations.length > 1 ? ` of loop ${loop + 1}` : "";
  return step ? `${of ? "step" : "loop"} ${step}${of}` : `start${of}`;
}
