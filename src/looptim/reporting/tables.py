"""Tables as Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..base.console import clean

ABSENT = "–"


class Cell(NamedTuple):
    """A number, or None if there is none, with what is printed around it."""

    value: float | None
    error: float | None = None
    mark: Literal["bold", "underline"] | None = None
    form: str = "{:.2f}"

    def error_text(self) -> str:
        """The value as it is printed, without a sign."""
        return self.form.replace("+", "").format(self.error)


@dataclass(frozen=True)
class Table:
    """Rows of labels and numbers."""

    name: str
    title: str
    header: list[str]
    rows: list[list[str | Cell]]
    notes: list[str]
    error: str = "stderr"
    """The meaning of the cells' errors, for programs that use them."""
    labels: int | None = None
    """The number of leading columns that name a row; by default all leading text columns."""

    def _repr_html_(self) -> str:
        return html_text([self])


def markdown(tables: Sequence[Table]) -> str:
    """Markdown tables, each under its title.

    >>> print(markdown([Table("t", "Title", ["Task", "run"], [["PIQA_n", Cell(75.625, 1.0, "bold")]], [])]))
    ## Title
    <BLANKLINE>
    | Task | run |
    |---|---:|
    | PIQA<sub>n</sub> | **75.62** ± 1.00 |
    <BLANKLINE>
    """
    parts = []
    for table in tables:
        numeric = [any(isinstance(row[i], Cell) for row in table.rows) for i in range(len(table.header))]
        lines = [
            f"## {_markdown_text(table.title)}",
            "",
            _pipe(map(_markdown_label, table.header)),
            f"|{'|'.join('---:' if right else '---' for right in numeric)}|",
            *(_pipe(_markdown_cell(cell) for cell in row) for row in table.rows),
            "",
            *(f"{_wrap(_markdown_text(note))}  " for note in table.notes),
        ]
        parts.append("\n".join(lines).rstrip() + "\n")
    return "\n".join(parts)


def _wrap(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _pipe(cells) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return _markdown_label(cell)
    if cell.value is None:
        return ABSENT
    text = cell.form.format(cell.value)
    text = {"bold": f"**{text}**", "underline": f"<u>{text}</u>", None: text}[cell.mark]
    return text if cell.error is None else f"{text} ± {cell.error_text()}"


def _markdown_label(text: str) -> str:
    base, sub, sup = _split(text)
    return (
        _markdown_text(base).replace("|", "\\|")
        + (f"<sub>{sub}</sub>" if sub else "")
        + (f"<sup>{sup}</sup>" if sup else "")
    ).replace("<sup>*</sup>", "<sup>\\*</sup>")


def _markdown_text(text: str) -> str:
    """Escape a text so that it starts no HTML, link or formula."""
    return re.sub(r"([\\<\[$])", r"\\\1", clean(text))


def _split(text: str) -> tuple[str, str, str]:
    """A label's base, subscript and superscript; names of runs may contain underscores themselves."""
    match = re.fullmatch(r"([A-Za-z0-9.+]+)_(n|\dshot)(?:\^(\*))?", text)
    return (match[1], match[2], match[3] or "") if match else (text, "", "")


def latex(tables: Sequence[Table]) -> str:
    """booktabs tables; they need `\\usepackage{booktabs}`, and `amssymb` where there is a check mark."""
    return "\n".join(_latex_table(table) for table in tables)


def _latex_table(table: Table) -> str:
    columns = "".join(
        "c" if any(isinstance(row[i], Cell) for row in table.rows) else "l" for i in range(len(table.header))
    )
    body: list[str] = []
    for index, row in enumerate(table.rows):
        before = table.rows[index - 1] if index else row
        if table.header[0] == "Category" and row[0] != before[0]:
            body.append("\\midrule")
        body.append(" & ".join(_latex_cell(cell) for cell in row) + " \\\\")
    notes = " ".join(_latex_label(note) for note in table.notes)
    return "\n".join(
        [
            "\\begin{table}[t]",
            "\\centering",
            f"\\caption{{{_latex_label(table.title)}. {notes}}}"
            if notes
            else f"\\caption{{{_latex_label(table.title)}.}}",
            f"\\label{{tab:{table.name}}}",
            f"\\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
            "\\toprule",
            " & ".join(f"\\textbf{{{_latex_label(name)}}}" if name else "" for name in table.header) + " \\\\",
            "\\midrule",
            *body,
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table}",
            "",
        ]
    )


def _latex_cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return _latex_label(cell)
    if cell.value is None:
        return "--"
    text = _latex_label(cell.form.format(cell.value))
    text = {"bold": f"\\textbf{{{text}}}", "underline": f"\\underline{{{text}}}", None: text}[cell.mark]
    return text if cell.error is None else f"{text} {{\\scriptsize $\\pm${cell.error_text()}}}"


SYMBOLS = {
    "\\": "\\textbackslash{}",
    "&": "\\&",
    "%": "\\%",
    "_": "\\_",
    "#": "\\#",
    "$": "\\$",
    "{": "\\{",
    "}": "\\}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "×": "$\\times$",
    "↓": "$\\downarrow$",
    "↑": "$\\uparrow$",
    "Δ": "$\\Delta$",
    "✓": "$\\checkmark$",
    "±": "$\\pm$",
    "–": "--",
    # Directly after the end of a row, these would be taken as its arguments.
    "[": "{[}",
    "*": "{*}",
}


def _latex_label(text: str) -> str:
    base, sub, sup = _split(text)
    base = "".join(SYMBOLS.get(letter, letter) for letter in clean(base))
    if base.endswith("+") and sub:
        base = base[:-1] + "$^+$"
    return base + (f"$_{{\\mathrm{{{sub}}}}}$" if sub else "") + (f"$^{{{sup}}}$" if sup else "")


def csv_text(tables: Sequence[Table]) -> str:
    """One line per number: table, row, column, value, error under its common name in all tables, mark."""
    (error_name,) = {table.error for table in tables}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "row", "column", "value", error_name, "mark"])
    for table in tables:
        for row in table.rows:
            labels = [cell for cell in row[: table.labels] if isinstance(cell, str)]
            for name, cell in zip(table.header, row, strict=True):
                if isinstance(cell, Cell) and cell.value is not None:
                    error = "" if cell.error is None else repr(cell.error)
                    label = " / ".join(label for label in labels if label)
                    texts = [_csv_label(text) for text in (table.name, label, name)]
                    writer.writerow([*texts, repr(cell.value), error, cell.mark or ""])
    return out.getvalue()


def _csv_label(text: str) -> str:
    """A text that a spreadsheet will not take for a formula.

    >>> _csv_label("=1+1"), _csv_label("a=1")
    ("'=1+1", 'a=1')
    """
    text = clean(text)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def html_text(tables: Sequence[Table]) -> str:
    """Tables for a page, each under its title, with notes below."""
    parts = []
    for table in tables:
        head = "".join(f"<th>{_html_label(name)}</th>" for name in table.header)
        rows = "".join(f"<tr><th>{_html_cell(first)}</th>{_html_row(rest)}</tr>" for first, *rest in table.rows)
        parts.append(f"<h2>{html.escape(clean(table.title))}</h2>")
        parts.append(f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>')
        parts += [f'<p class="note">{html.escape(clean(note))}</p>' for note in table.notes]
    return "".join(parts)


def _html_row(cells: Sequence[str | Cell]) -> str:
    return "".join(f"<td>{_html_cell(cell)}</td>" for cell in cells)


def _html_cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return _html_label(cell)
    if cell.value is None:
        return ABSENT
    text = html.escape(cell.form.format(cell.value))
    text = {"bold": f"<b>{text}</b>", "underline": f"<u>{text}</u>", None: text}[cell.mark]
    return text if cell.error is None else f"{text} ± {html.escape(cell.error_text())}"


def _html_label(text: str) -> str:
    base, sub, sup = _split(text)
    return html.escape(clean(base)) + (f"<sub>{sub}</sub>" if sub else "") + (f"<sup>{sup}</sup>" if sup else "")


def page_table(table: Table) -> dict[str, Any]:
    """Tables for the page of a report, as plain text and numbers, as they are printed."""
    return {
        "title": clean(table.title),
        "header": [_page_cell(name) for name in table.header],
        "rows": [[_page_cell(cell) for cell in row] for row in table.rows],
        "notes": [clean(note).replace("**", "") for note in table.notes],
    }


def _page_cell(cell: str | Cell) -> dict[str, Any]:
    if isinstance(cell, str):
        base, sub, sup = _split(cell)
        return {"text": clean(base), "sub": sub, "sup": sup, "mark": None}
    text = ABSENT if cell.value is None else cell.form.format(cell.value)
    if cell.value is not None and cell.error is not None:
        text += f" ± {cell.error_text()}"
    return {"text": text, "sub": "", "sup": "", "mark": cell.mark}


FORMATS: Mapping[str, Callable[[Sequence[Table]], str]] = {"md": markdown, "tex": latex, "csv": csv_text}
