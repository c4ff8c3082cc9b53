// The look page: tokens across, loops down, and everything about the one cell the cursor is on.
import { Cursor, Data, Exit, Model, rowName } from "./data";
import { darken, el, mark, painted, percent, select, short, unpack, visible } from "./dom";
import { answers, attention, equation, experts, numbers, optimizer } from "./panels";
import { Shade, numbersOf, rangeOf, shades } from "./shade";

class View {
  readonly root: HTMLElement;
  private readonly cells: HTMLTableCellElement[][] = [];
  private readonly heads: HTMLTableCellElement[] = [];
  private readonly panels = el("div", { class: "panels" });
  private readonly layer = { index: 0 };
  private readonly scale = el("p", { class: "note" });
  private readonly said = el("p", { class: "said", role: "status", "aria-live": "polite" });
  /** What the grid scrolls in; two grids scroll together. */
  readonly scroll: HTMLElement;

  constructor(readonly data: Data, readonly model: Model, move: (to: Cursor, stay: boolean) => void) {
    this.layer.index = Math.max(0, model.layers.findIndex((layer) => layer.place === "in the loop"));
    const table = el("table", { class: "grid", role: "grid", "aria-label": `${model.name}: tokens across, loops down` });
    const head = el("tr", {}, el("th", { scope: "col" }, "text"));
    for (const id of data.tokens) {
      const cell = el("th", { scope: "col" }, el("bdi", {}, visible(data.pieces[id])));
      this.heads.push(cell);
      head.append(cell);
    }
    table.append(el("thead", {}, head), this.body(move));
    table.addEventListener("mouseleave", () => move({ token: -1, row: -1 }, false));
    table.addEventListener("keydown", (event) => this.key(event));
    this.scroll = el("div", { class: "scroll" }, table);
    this.root = el("section", { class: "model" },
      el("h2", {}, el("bdi", {}, model.name)), el("div", {}, ...model.equations.map(equation)),
      this.scale, this.scroll, this.said, this.panels);
  }

  private body(move: (to: Cursor, stay: boolean) => void): HTMLElement {
    const body = el("tbody");
    this.model.rows.forEach((_, row) => {
      const line = el("tr", {}, el("th", { scope: "row" }, rowName(this.model, row)));
      line.style.setProperty("--row", String(row));
      this.cells.push(this.data.tokens.map((_, token) => {
        const says = this.data.pieces[this.model.lens.top[row][token][0]];
        const cell = el("td", {
          tabindex: -1, mouseenter: () => move({ token, row }, false), focus: () => move({ token, row }, true),
          click: () => cell.focus(),
        }, el("bdi", {}, visible(says)), el("small"));
        if (this.model.lens.top[row][token][0] === this.data.tokens[token + 1]) cell.classList.add("right");
        if (this.model.lens.settles[token] === row) cell.classList.add("settles");
        line.append(cell);
        return cell;
      }));
      body.append(line);
    });
    return body;
  }

  /** The arrow keys move the focus, and with it the cursor. */
  private key(event: KeyboardEvent): void {
    const row = this.cells.findIndex((cells) => cells.includes(event.target as HTMLTableCellElement));
    if (row < 0) return;
    const token = this.cells[row].indexOf(event.target as HTMLTableCellElement);
    const last = this.data.tokens.length - 1;
    const steps: Record<string, [number, number]> = {
      ArrowLeft: [row, token - 1], ArrowRight: [row, token + 1], ArrowUp: [row - 1, token],
      ArrowDown: [row + 1, token], Home: [row, 0], End: [row, last], PageUp: [0, token],
      PageDown: [this.cells.length - 1, token],
    };
    const to = steps[event.key];
    if (!to) return;
    event.preventDefault();
    this.cells[to[0]]?.[to[1]]?.focus();
  }

  shade(shade: Shade, [low, high]: [number, number]): void {
    const all = numbersOf(shade, this.model);
    const [light, dark] = shade.ends(low, high);
    this.scale.replaceChildren(`Shade: ${shade.title}, from ${light} to ${dark}. `, el("span", { class: "ramp" }));
    this.cells.forEach((cells, row) => cells.forEach((cell, token) => {
      const value = all[row][token];
      const dark = value === null ? 0 : Math.min(1, Math.max(0, shade.dark(value, low, high)));
      darken(cell, dark);
      cell.lastElementChild!.textContent = shade.show(value);
    }));
  }

  /** Mark where each token would leave the loop; null marks nothing. */
  leave(depths: number[] | null): void {
    this.cells.forEach((cells, row) => cells.forEach((cell, token) => {
      const gone = depths !== null && this.model.rows[row].step > depths[token];
      cell.classList.toggle("gone", gone);
    }));
    this.heads.forEach((head, token) => {
      if (depths) head.dataset.depth = String(depths[token]);
      else delete head.dataset.depth;
    });
  }

  show(at: Cursor): void {
    this.root.querySelectorAll(".at").forEach((node) => node.classList.remove("at"));
    const row = Math.min(at.row, this.cells.length - 1);
    this.root.querySelector('td[tabindex="0"]')?.setAttribute("tabindex", "-1");
    this.cells[row][at.token].setAttribute("tabindex", "0");
    this.cells[row][at.token].classList.add("at");
    this.heads[at.token].classList.add("at");
    this.cells[row][0].parentElement!.firstElementChild!.classList.add("at");
    const cursor = { token: at.token, row };
    this.said.replaceChildren(...this.sentence(cursor));
    // The panels are made anew; the keyboard stays with what it was used on.
    const choose = (panel: string) => (index: number) => {
      this.layer.index = index;
      this.show(cursor);
      this.panels.querySelector<HTMLElement>(`.${panel} select`)?.focus();
    };
    this.panels.replaceChildren(
      answers(this.data, this.model, cursor), optimizer(this.model, cursor),
      attention(this.data, this.model, cursor, this.layer.index, choose("attention")),
      experts(this.model, cursor, this.layer.index, choose("experts")), numbers(this.data, this.model, cursor),
    );
  }

  private sentence({ token, row }: Cursor): (Node | string)[] {
    const { lens, left } = this.model;
    const piece = (id: number) => `“${visible(this.data.pieces[id])}”`;
    const [says, rank, next] = [lens.top[row][token][0], lens.rank[row][token], this.data.tokens[token + 1]];
    const truth = rank === null ? "" : ` The text goes on with ${piece(next)}: rank ${rank}, ${percent(lens.true[row][token])}.`;
    const far = row === this.cells.length - 1 ? "" : ` KL divergence to the last loop: ${short(lens.kl[row][token])} nats.`;
    const real = left ? ` With early exit the token left after ${left.depths[token]} ${left.depths[token] === 1 ? "loop" : "loops"} ` +
      `and predicted ${piece(left.says[token])} (${percent(left.probability[token])}).` : "";
    return [`After ${piece(this.data.tokens[token])}, ${the(this.model, row)} predicts `,
      el("b", says === next ? { class: "right" } : {}, el("bdi", {}, piece(says))),
      ` (${percent(lens.probability[row][token][0])}).${truth}${far} ` +
      `The prediction settles at ${the(this.model, lens.settles[token])}.${real}`];
  }
}

/** A row in the middle of a sentence. */
function the(model: Model, row: number): string {
  return model.rows[row].step ? rowName(model, row) : `the ${rowName(model, row)}`;
}

/** How deep each token goes under an exit: it leaves after the first step, from `minimum` on, that is below. */
function depths(exit: Exit, threshold: number, minimum: number): number[] {
  return exit.values[0].map((_, token) => {
    const left = exit.values.findIndex((step, index) => index + 1 >= minimum && step[token] < threshold);
    return left < 0 ? exit.values.length : left + 1;
  });
}

/** What the signals of `lo.depth.Exit` measure. */
const SIGNALS: Record<string, string> = {
  residual: "residual ‖t − o‖ / ‖t‖", change: "change ‖Y′ − Y‖ / ‖Y′‖", acceleration: "acceleration of the state",
  kl: "KL to the loop before", entropy: "entropy (nats)", margin: "1 − margin of the top two",
};

function exits(models: Model[], views: View[]): HTMLElement {
  const names = [...new Set(models.flatMap((model) => model.exits.map((exit) => exit.signal)))];
  if (!names.length) return el("span");
  let signal = names[0];
  const slider = el("input", { type: "range", min: 0, max: 1000, value: 0, "aria-label": "threshold", input: slide });
  const exact = el("input", { type: "number", min: 0, step: "any", value: 0, "aria-label": "threshold, exactly", input: apply });
  const least = el("input", { type: "number", min: 1, step: 1, value: 1, "aria-label": "minimum of loops", input: apply });
  const said = el("output", { class: "note" });

  function range(): [number, number] {
    const all = models.flatMap((model) => model.exits.filter((exit) => exit.signal === signal))
      .flatMap((exit) => exit.values.flat()).filter((value) => value > 0 && value < 1e30);
    return [Math.min(...all), Math.max(...all) * 1.001];
  }
  function slide(): void {
    const [low, high] = range();
    const part = Number(slider.value) / 1000;
    exact.value = part ? (low * (high / low) ** part).toPrecision(3) : "0";
    apply();
  }
  function apply(): void {
    const parts = models.map((model, index) => {
      const exit = model.exits.find((each) => each.signal === signal);
      const found = exit && Number(exact.value) > 0 ? depths(exit, Number(exact.value), Number(least.value)) : null;
      const real = found ? null : model.left;
      views[index].leave(found ?? real?.depths ?? null);
      const mean = (all: number[]) => `a token runs ${short(all.reduce((a, b) => a + b) / all.length)} of ${exit!.values.length} loops on average`;
      return real ? `${mean(real.depths)}, measured with early exit (${real.rule})` : found ? mean(found) : "every token runs all loops";
    });
    const differ = new Set(parts).size > 1;
    const estimated = Number(exact.value) > 0 ? " This is an estimate from a run at full depth: " +
      "a token that really left would also change what later tokens see." : "";
    const text = differ ? parts.map((part, index) => `${models[index].name}: ${part}`).join("; ") : parts[0];
    said.textContent = `${differ ? text : text[0].toUpperCase() + text.slice(1)}.${estimated}`;
  }
  apply();
  // On a phone the controls would stand between the reader and the grid.
  return el("details", { class: "exits", open: innerWidth > 600 }, el("summary", {}, "Early exit: what if tokens could leave the loop?"), el("fieldset", {},
    select("a token leaves when its", names.map((name) => [name, SIGNALS[name] ?? name]), (value) => { signal = value; slide(); }),
    el("label", { class: "control" }, "is below ", slider, exact), el("label", { class: "control" }, "after at least ", least, " loops"), said));
}

async function main(): Promise<void> {
  const page = document.getElementById("page")!;
  const title = [
    el("h1", {}, mark(), "Inside the loop"),
    el("p", { class: "lead" }, "The text runs across, the loops run down; “start” is before the first loop. Each cell is the model’s " +
      "top prediction for the next token if it stopped looping there. Point at a cell, tap it, or use the arrow keys."),
  ];
  page.replaceChildren(...title);
  const data = await unpack<Data>();
  // A long text has thousands of nodes, which take longer to draw than a reader should look at nothing.
  await painted();
  // The first tokens have little to look back at; the next ones are on the screen of a phone, too.
  const kept = { token: Math.max(0, Math.min(3, data.tokens.length - 2)), row: data.models[0].rows.length - 1 };
  const views = data.models.map((model) => new View(data, model, move));

  for (const from of views) {
    from.scroll.addEventListener("scroll", () => views.forEach((view) => {
      // Setting what is set already tells nobody, so two grids do not push each other on.
      if (view !== from) view.scroll.scrollLeft = from.scroll.scrollLeft;
    }));
  }

  function move(to: Cursor, stay: boolean): void {
    if (stay) Object.assign(kept, to);
    const at = to.token < 0 ? kept : to;
    views.forEach((view) => view.show(at));
  }
  const known = shades(data);
  const paint = (name: string) => views.forEach((view) =>
    view.shade(known[name], rangeOf(known[name], known[name].shared ? data.models : [view.model])));
  document.title = `${data.models.map((model) => model.name).join(" and ")} · looptim look`;
  page.replaceChildren(
    el("header", {},
      ...title,
      el("div", { class: "controls" },
        select("shade by", Object.entries(known).map(([name, shade]) => [name, shade.title]), paint),
        exits(data.models, views)),
      el("p", { class: "note keys" },
        el("span", {}, el("b", { class: "right" }, "bold and underlined"), ": the prediction is the token that really comes next"),
        el("span", {}, el("span", { class: "mark" }), ": from here on the prediction no longer changes"))),
    el("div", { class: "models" }, ...views.map((view) => view.root)),
  );
  paint("probability");
  move(kept, true);
  document.documentElement.dataset.ready = "yes";
}

void main();
