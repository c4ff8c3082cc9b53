// The page of a report or a study: the loss first, then everything else that runs logged.
import { Plot, count, isDark, onScheme, swatch } from "./chart";
import { onPaper } from "./curves";
import { el, mark, painted, select, unpack, visible } from "./dom";
import { forest } from "./forest";
import { heat } from "./heat";
import { equation } from "./panels";
import { Cell, Data, Table, View } from "./report_data";

const SMOOTHINGS = [0, 2, 4, 8, 16];
const SHARES: [string, string][] = [["1", "the whole training"], ["0.5", "its last half"], ["0.2", "its last fifth"]];

/** What the reader chose, kept over the reading anew of a page that is watched. */
function remembered(): View {
  const view: View = { hidden: [], smoothing: 4, bits: false, range: null, single: 0 };
  if (!location.hash) return view;
  try {
    return { ...view, ...JSON.parse(decodeURIComponent(location.hash.slice(1))) };
  } catch {
    return view;
  }
}

function toggles(data: Data, view: View, redraw: () => void): HTMLElement {
  const box = el("fieldset", { class: "toggles" }, el("legend", {}, "Shown"));
  data.groups.forEach((group) => {
    const input = el("input", { type: "checkbox", checked: !view.hidden.includes(group.name), change: () => {
      view.hidden = view.hidden.filter((name) => name !== group.name).concat(input.checked ? [] : [group.name]);
      redraw();
    } });
    const line = el("span", { class: "line" }, swatch(onPaper(group.color, isDark()), group.dash));
    onScheme(() => line.replaceChildren(swatch(onPaper(group.color, isDark()), group.dash)));
    box.append(el("label", { class: "control" }, input, line, el("bdi", {}, visible(group.name).replaceAll("·", " "))));
  });
  return box;
}

function controls(data: Data, view: View, redraw: () => void): HTMLElement {
  const bar = el("div", { class: "controls" });
  const choose = (label: string, options: [string, string][], now: string, change: (value: string) => void) => {
    const made = select(label, options, (value) => { change(value); redraw(); });
    made.querySelector("select")!.value = now;
    bar.append(made);
  };
  if (data.charts.some((chart) => chart.noisy))
    choose("smoothing", SMOOTHINGS.map((value) => [String(value), value ? `over ${value}%` : "none"]), String(view.smoothing),
      (value) => { view.smoothing = Number(value); });
  if (data.groups.some((group) => group.bits))
    choose("loss in", [["nats", "nats per token"], ["bits", "bits per byte"]], view.bits ? "bits" : "nats",
      (value) => { view.bits = value === "bits"; });
  const ends = data.charts.filter((chart) => chart.x === "training tokens").flatMap((chart) => chart.lines.flatMap((line) => line.x.slice(-1)));
  if (ends.length)
    choose("show", [...SHARES, ["", "the zoomed part"]], view.range ? "" : "1", (value) => {
      const end = Math.max(...ends);
      if (value) view.range = value === "1" ? null : [end * (1 - Number(value)), end];
    });
  if (data.groups.length > 1 && data.charts.some((chart) => chart.single))
    choose("charts per loop show", data.groups.map((group, i) => [String(i), group.name]), String(view.single), (value) => { view.single = Number(value); });
  return bar;
}

function inside({ text, sub, sup }: Cell): HTMLElement {
  return el("bdi", {}, text, ...(sub ? [el("sub", {}, sub)] : []), ...(sup ? [el("sup", {}, sup)] : []));
}

function table({ title, header, rows, notes }: Table): HTMLElement {
  const body = rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, inside(first)),
    ...rest.map((cell) => el("td", cell.mark ? { class: cell.mark } : {}, inside(cell)))));
  return el("section", {}, el("h2", {}, title),
    ...(rows.length ? [el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, el("table", { class: "numbers" },
      el("tr", {}, ...header.map((cell) => el("th", { scope: "col" }, inside(cell)))), ...body))] : []),
    ...notes.map((note) => el("p", { class: "note" }, note)));
}

/** What the runs wrote while they were trained: steps down, runs across. */
function samples(data: Data, view: View): HTMLElement {
  const shown = data.samples.filter(({ group }) => !view.hidden.includes(data.groups[group].name));
  if (!shown.length) return el("section");
  const tokens = [...new Set(shown.flatMap(({ texts }) => texts.map((text) => text.tokens)))].sort((a, b) => a - b);
  const rows = tokens.map((at) => el("tr", {}, el("th", { scope: "row" }, count(at)), ...shown.map(({ prompt, texts }) => {
    const found = texts.find((text) => text.tokens === at);
    return el("td", {}, found ? el("bdi", {}, el("span", { class: "prompt" }, readable(prompt)), readable(found.text)) : "–");
  })));
  return el("section", { class: "samples" }, el("h2", {}, "Samples during training"),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "samples" }, el("table", {},
      el("tr", {}, el("th", { scope: "col" }, "tokens"), ...shown.map(({ group }) => el("th", { scope: "col" }, el("bdi", {}, data.groups[group].name)))),
      ...rows)));
}

/** Each file folded away; of many, also their list. */
function files(all: Data["files"]): HTMLElement[] {
  const each = all.map(({ name, text }) => el("details", {}, el("summary", {}, el("bdi", {}, name)), el("pre", {}, text)));
  const shown = all.length > 12 ? [el("details", {}, el("summary", {}, `${all.length} files`), ...each)] : each;
  return all.length ? [el("h2", {}, "Files"), ...shown] : [];
}

/** A text with its lines and spaces as they are, and with what would be invisible or turn it around written as its number. */
const readable = (text: string) => text.split(/([ \n\t])/).map((part) => (/^[ \n\t]$/.test(part) ? part : visible(part))).join("");

async function main(): Promise<void> {
  const data = await unpack<Data>();
  const view = remembered();
  const plots = data.charts.map((chart) => new Plot(chart, data, view, (range) => { view.range = range; redraw(); }));
  const [bar, written, differences] = [el("div"), el("div"), el("div", { class: "charts" })];
  const [first, ...others] = plots.map((plot) => plot.root);

  function redraw(): void {
    bar.replaceChildren(controls(data, view, redraw));
    plots.forEach((plot) => plot.draw());
    written.replaceChildren(samples(data, view));
    differences.replaceChildren(...data.forests.map((each) => forest(each, data, view)), ...data.heats.map((each) => heat(each, data, view)));
    if (data.watch) history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(view))}`);
  }
  document.title = `${data.title} · looptim report`;
  const page = document.getElementById("page")!;
  const title = el("h1", {}, mark(), visible(data.title).replaceAll("·", " "));
  page.replaceChildren(title);
  await painted();
  page.replaceChildren(
    title, toggles(data, view, redraw), bar, ...(first ? [first] : []), differences,
    ...data.equations.map(equation), el("div", { class: "charts" }, ...others), written, ...data.tables.map(table),
    ...files(data.files),
    ...data.notes.map((note) => el("p", { class: "note" }, note)));
  redraw();
  onScheme(redraw);
  if (data.watch) setTimeout(() => location.reload(), 1000 * data.watch);
  document.documentElement.dataset.ready = "yes";
}

void main();
