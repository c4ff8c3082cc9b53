// Elements made without ever parsing text as HTML, and text made visible.

type Child = Node | string;
type Attributes = Record<string, string | number | boolean | ((event: any) => void)>;

function fill<T extends Element>(node: T, attributes: Attributes, children: Child[]): T {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}

export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

export function select(label: string, options: [string, string][], change: (value: string) => void): HTMLElement {
  const box = el("select", { "aria-label": label, change: () => change(box.value) });
  box.append(...options.map(([value, text]) => el("option", { value }, text)));
  return el("label", { class: "control" }, label + " ", box);
}

/** Shade a node by a share from 0 to 1; where its text would fade, which is later on white paper, it turns over. */
export function darken(node: HTMLElement, share: number): void {
  node.style.setProperty("--dark", `${Math.round(100 * share)}%`);
  node.classList.toggle("deep", share > 0.55);
  node.classList.toggle("deepest", share > 0.7);
}

/** The mark of looptim: a loop that comes closer to its end each time. */
export const mark = () => svg("svg", { viewBox: "0 0 24 24", class: "logo", "aria-hidden": "true" },
  svg("path", { d: "M22 12A10 10 0 0 1 2 12A8 8 0 0 1 18 12A6 6 0 0 1 6 12A4 4 0 0 1 14 12" }), svg("circle", { cx: 11.4, cy: 12.6, r: 2 }));

/** A formula: what stands after an underscore is a subscript. */
export function math(text: string): HTMLElement {
  const parts = text.split(/_(\w+)/);
  return el("span", { class: "math" }, ...parts.map((part, i) => (i % 2 ? el("sub", {}, part) : part)));
}

const NAMED: Record<string, string> = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" };

/** A token with its spaces shown, and with what would be invisible or turn the line around written as its number. */
export function visible(text: string): string {
  const shown = text.replace(/[ \n\t\r]/g, (letter) => NAMED[letter]);
  return shown.replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu, (letter) =>
    `⟨${letter.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** A number in three significant digits. */
export function short(value: number | null): string {
  if (value === null) return "–";
  // Sums of numbers that cancel leave a rest of this size.
  if (Math.abs(value) < 1e-12) return "0";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return value.toExponential(2);
  return String(Number(value.toPrecision(3)));
}

/** A share in three significant digits; of the smallest, the zeros at the end say nothing. */
export function percent(value: number | null): string {
  if (value === null) return "–";
  const digits = (100 * value).toPrecision(3);
  return `${value >= 1e-4 && value < 1 ? digits : Number(digits)}%`;
}

/** When what is on the page so far has been drawn; where nothing is drawn, as in a hidden tab, soon. */
export function painted(): Promise<void> {
  return new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done));
    setTimeout(done, 100);
  });
}

/** The data that Python packed into the page. */
export async function unpack<T>(): Promise<T> {
  const packed = document.getElementById("data")!.textContent!.trim();
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}
