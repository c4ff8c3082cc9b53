// What stands below the grid: one panel for each question about the cell the cursor is on.
import { Cursor, Data, Equation, Layer, Model, Quantity, rowName } from "./data";
import { darken, el, math, percent, select, short, svg, visible } from "./dom";
import { cellOf } from "./shade";

function panel(name: string, title: string, ...children: (Node | string)[]): HTMLElement {
  return el("article", { class: `panel ${name}` }, el("h3", {}, title), ...children);
}

const bar = (share: number) => {
  const node = el("span", { class: "bar", "aria-hidden": "true" });
  node.style.setProperty("--share", `${100 * share}%`);
  return node;
};

const several = (names: string[]) => (names.length > 3 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", "));

export function equation(row: Equation): HTMLElement {
  const parts: [string, string][] = [
    ["target", `t = ${row.target}`], ["start", `Y₀ = ${row.start}`], ["read-out", row.readout],
    ["writes through", `${row.input_map}, ${row.aligned ? "the map it reads through (aligned)" : "not the map it reads through (mismatch)"}`],
    ...row.where.map((text): [string, string] => ["where", text]),
  ];
  const formulas = [row.rule, "G = xᵀ L′(o)", `o = ${row.projection}`, `L = ${row.objective}`, `η = ${row.step}`,
    `λ = ${row.decay}`, `x = ${row.input_map}`];
  return el("details", { class: "equation" },
    el("summary", {}, el("b", {}, row.name), row.of?.length ? el("small", {}, ` of ${several(row.of)}`) : "", ...formulas.flatMap((formula) => [" ", math(formula)])),
    el("p", { class: "note" }, (row.steps ? `${row.steps} loops. ` : "") +
      `${row.loop_specific ? "Each loop has its own transition parameters" : "All loops share one transition"}. ${row.summary}`),
    el("dl", {}, ...parts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, math(text))])));
}

export function answers(data: Data, model: Model, { token, row }: Cursor): HTMLElement {
  const { top, probability } = model.lens;
  const next = data.tokens[token + 1];
  const list = el("ol", { class: "answers" }, ...top[row][token].map((id, place) => {
    const chance = probability[row][token][place];
    return el("li", id === next ? { class: "right" } : {},
      el("bdi", {}, visible(data.pieces[id])), bar(chance), el("span", { class: "value" }, percent(chance)));
  }));
  const truth = next === undefined ? "" : `; the text continues with “${visible(data.pieces[next])}”`;
  return panel("says", `Predictions at ${rowName(model, row)}`,
    el("p", { class: "note" }, `After “${visible(data.pieces[data.tokens[token]])}”${truth}.`), list);
}

const [WIDTH, HEIGHT, LEFT] = [200, 98, 6];

function line(points: (number | null)[], x: (i: number) => number, y: (v: number) => number, name: string): SVGElement {
  let path = "";
  points.forEach((value, i) => {
    if (value !== null) path += `${path && points[i - 1] !== null ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  return svg("path", { d: path, class: name });
}

const label = (text: string, x: number, y: number, anchor: string) =>
  svg("text", { x, y, "text-anchor": anchor, class: "tick", "aria-hidden": "true" }, text);

/** One quantity over the loops: a line for each stream of the token, over the range of all tokens. */
function chart(model: Model, quantity: Quantity, { token, row }: Cursor): HTMLElement {
  const cells = quantity.values.map((tokens) => tokens?.[token] ?? null);
  const streams = Math.max(...cells.map((cell) => (Array.isArray(cell) ? cell.length : 1)));
  const lines = Array.from({ length: streams }, (_, stream) =>
    cells.map((cell) => (Array.isArray(cell) ? cell[stream] : cell)));
  const all = quantity.values.map((tokens) => (tokens ?? []).flat().filter((value): value is number => value !== null));
  const known = all.flat();
  let [low, high] = [Math.min(...known), Math.max(...known)];
  // What differs in the last digits only is drawn as the level line that it is.
  const room = 0.02 * Math.max(Math.abs(low), Math.abs(high)) || 1;
  if (high - low < room) [low, high] = [low - room / 2, high + room / 2];
  const x = (i: number) => LEFT + (i / Math.max(1, model.rows.length - 1)) * (WIDTH - 2 * LEFT);
  const y = (value: number) => 16 + (1 - (value - low) / (high - low)) * (HEIGHT - 36);
  const spans = all.map((values, i) => (values.length
    ? svg("line", { x1: x(i), x2: x(i), y1: y(Math.min(...values)), y2: y(Math.max(...values)), class: "range" })
    : svg("g")));
  const now = cells[row];
  const value = Array.isArray(now) ? now.map(short).join("  ") : short(now);
  const values = Array.isArray(now) && streams > 1
    ? now.flatMap((each, stream) => [el("span", { class: `s${stream % 4}` }, short(each)), " "]) : [value];
  return el("figure", { "data-quantity": quantity.key },
    el("figcaption", {}, el("b", {}, quantity.title), ` ${quantity.meaning}`),
    el("span", { class: "value" }, ...values),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${quantity.title}: ${value}` },
      ...spans, svg("line", { x1: x(row), x2: x(row), y1: 14, y2: HEIGHT - 16, class: "cursor" }),
      label(short(high), 0, 10, "start"), label(short(low), 0, HEIGHT - 3, "start"),
      label(rowName(model, row), WIDTH, HEIGHT - 3, "end"),
      ...lines.map((points, stream) => line(points, x, y, `stream s${stream % 4}`)),
      ...lines.map((points, stream) => (points[row] === null ? svg("g")
        : svg("circle", { cx: x(row), cy: y(points[row]!), r: 3, class: `stream s${stream % 4}` })))));
}

/** The name of a stream in the color and with the dashes of its line. */
const key = (stream: number) => el("span", { class: `legend s${stream % 4}` },
  svg("svg", { viewBox: "0 0 26 10", class: "key", "aria-hidden": "true" },
    svg("path", { d: "M0 5H26", class: `stream s${stream % 4}` })), ` ${stream + 1}`);

export function optimizer(model: Model, at: Cursor): HTMLElement {
  const cells = model.quantities.flatMap(({ values }) => values.flatMap((tokens) => tokens?.slice(0, 1) ?? []));
  const streams = Math.max(...cells.map((cell) => (Array.isArray(cell) ? cell.length : 1)));
  return panel("optimizer", "The optimizer’s view",
    el("p", { class: "note" }, "This token from loop to loop. Gray bars show the range over all tokens.",
      ...(streams > 1 ? [" Streams: ", ...Array.from({ length: streams }, (_, i) => [key(i), " "]).flat()] : [])),
    el("div", { class: "charts" }, ...model.quantities.map((quantity) => chart(model, quantity, at))));
}

/** The visit of a layer that belongs to a row: a looped layer is visited once a step, others once. */
const visitAt = (layer: Layer, model: Model, row: number, visits: number) =>
  layer.place === "in the loop" ? Math.min(visits - 1, Math.max(0, model.rows[row].step - 1)) : 0;

function chooser(layers: Layer[], index: number, choose: (index: number) => void): HTMLElement {
  const label = select("layer", layers.map((layer, i) => [String(i), `${layer.name}, ${layer.place}`]), (value) => choose(Number(value)));
  label.querySelector("select")!.value = String(index);
  return label;
}

export function attention(
  data: Data, model: Model, { token, row }: Cursor, index: number, choose: (index: number) => void
): HTMLElement {
  const layer = model.layers[index];
  if (!layer?.attention.length) return el("span");
  const visit = visitAt(layer, model, row, layer.attention.length);
  const { source, weight } = layer.attention[visit];
  const weights = new Map(source[token].map((from, place) => [from, weight[token][place]]));
  const most = Math.max(...weights.values());
  const text = el("p", { class: "text" }, ...data.tokens.map((id, place) => {
    const share = place <= token ? weights.get(place) ?? 0 : 0;
    const word = el("bdi", { title: share ? percent(share) : "", class: place === token ? "here" : "" }, visible(data.pieces[id]));
    darken(word, share / most);
    return word;
  }));
  const list = el("ol", { class: "answers" }, ...source[token].map((from, place) => [from, weight[token][place]])
    .filter(([, share]) => share > 0).map(([from, share]) =>
      el("li", {}, el("span", { class: "from" }, el("bdi", {}, visible(data.pieces[data.tokens[from]])), " ",
        el("small", {}, from === token ? "itself" : `${token - from} back`)), bar(share), el("span", { class: "value" }, percent(share)))));
  return panel("attention", "Attention",
    el("div", { class: "controls" }, chooser(model.layers, index, choose)),
    el("p", { class: "note" }, `Where the framed token looks: the eight tokens with the largest weight, averaged over heads. Visit ${visit + 1} of ${layer.attention.length} to this layer.`),
    text, list);
}

export function experts(model: Model, { token, row }: Cursor, index: number, choose: (index: number) => void): HTMLElement {
  const layers = model.layers.filter((layer) => layer.experts.length);
  if (!layers.length) return el("span");
  const layer = model.layers[index].experts.length ? model.layers[index] : layers[0];
  const now = visitAt(layer, model, row, layer.experts.length);
  const chosen = layer.experts.map((visit) => visit.chosen);
  const share = (a: number[], b: number[]) => a.filter((expert) => b.includes(expert)).length / a.length;
  const visits = el("table", {}, el("tr", {}, el("th", {}, "visit"), el("th", {}, "experts of this token (weight)")),
    ...layer.experts.map((visit, i) => el("tr", i === now ? { class: "at" } : {}, el("th", { scope: "row" }, String(i + 1)),
      el("td", {}, visit.chosen[token].map((expert, place) => `${expert} (${short(visit.weight[token][place])})`).join(", ")))));
  const overlap = el("table", { class: "overlap" },
    el("tr", {}, el("th", {}, "visit"), ...chosen.map((_, j) => el("th", { scope: "col" }, String(j + 1)))),
    ...chosen.map((from, i) => el("tr", {}, el("th", { scope: "row" }, String(i + 1)), ...chosen.map((to, j) => {
      const mean = from.reduce((sum, experts, each) => sum + share(experts, to[each]), 0) / from.length;
      const cell = el("td", {}, String(Math.round(100 * mean)));
      darken(cell, mean);
      return cell;
    }))));
  return panel("experts", "Experts",
    el("div", { class: "controls" }, chooser(model.layers, model.layers.indexOf(layer), choose)),
    el("div", { class: "beside" }, visits, el("div", {},
      el("p", { class: "note" }, "Experts that two visits have in common, in percent, averaged over all tokens:"),
      el("div", { class: "scroll" }, overlap))));
}

/** Everything about one token as a table, which a screen reader can read. */
export function numbers(data: Data, model: Model, { token, row }: Cursor): HTMLElement {
  const { lens, quantities } = model;
  const head = ["after", "predicts", "probability", "of the true token", "its rank", "KL to the last loop", ...quantities.map((each) => each.title)];
  const rows = model.rows.map((_, i) => [
    visible(data.pieces[lens.top[i][token][0]]), percent(lens.probability[i][token][0]), percent(lens.true[i][token]),
    String(lens.rank[i][token] ?? "–"), short(lens.kl[i][token]), ...quantities.map(({ values }) => {
      const cell = values[i]?.[token] ?? null;
      return Array.isArray(cell) ? cell.map(short).join(" ") : short(cellOf(values, i, token));
    }),
  ]);
  return panel("numbers", "As a table", el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "numbers" },
    el("table", {}, el("caption", {}, `Token ${token + 1} of ${data.tokens.length}, “${visible(data.pieces[data.tokens[token]])}”`),
      el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name))),
      ...rows.map((cells, i) => el("tr", i === row ? { class: "at" } : {}, el("th", { scope: "row" }, rowName(model, i)),
        ...cells.map((cell) => el("td", {}, el("bdi", {}, cell))))))));
}
