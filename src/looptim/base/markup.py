"""Tables in HTML for notebooks and in Markdown for docs; cells are always escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final


def html_table(rows: Iterable[Sequence[object]], *, head: Sequence[object] = (), title: str = "") -> str:
    """A table with a title; the first cell of each row is its header.

    >>> html_table([["a", "<b>"]])
    '<table><tr><th>a</th><td>&lt;b&gt;</td></tr></table>'
    """
    caption = f"<caption>{_text(title)}</caption>" if title else ""
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    lines = [
        f"<tr><th>{_text(first)}</th>{''.join(f'<td>{_text(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    ]
    return f"<table>{caption}{f'<tr>{top}</tr>' if top else ''}{''.join(lines)}</table>"


@final
class Answer(dict[str, Any]):
    """A dict of numbers that a notebook shows as the table that the command line prints.

    >>> Answer({"seconds": 2.0}, head=["what", "how long"], rows=[["all", "2 s"]])
    {'seconds': 2.0}
    """

    def __init__(self, values: Mapping[str, Any], *, head: Sequence[str], rows: Sequence[Sequence[str]]):
        super().__init__(values)
        self.head, self.rows = head, rows

    def _repr_html_(self) -> str:
        return html_table(self.rows, head=self.head)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown_table(["key", "type"], [["a", "x | y"]]))
    | key | type |
    | --- | --- |
    | a | x \\| y |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _text(cell: object) -> str:
    return html.escape(str(cell))
