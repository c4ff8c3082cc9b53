"""A loop's row of the paper's table, read off its parts."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import final

from ..base.markup import html_table
from .base import require, symbol
from .diagnose import diagnose_maps, input_map
from .loop import Loop


@final
@dataclasses.dataclass(frozen=True)
class Description:
    """A row of the paper's Table 7, computed from the parts of a loop."""

    name: str
    projection: str
    """`o`."""
    decay: str
    """`lambda`."""
    step: str
    """`eta`."""
    input_map: str
    """`x`, the map through which the error is written."""
    objective: str
    """`L`."""
    target: str
    """`t`."""
    rule: str
    """The update, with `G = x^T L'(o)`."""
    rule_name: str
    aligned: bool
    loop_specific: bool
    start: str
    readout: str
    parameters: int
    where: tuple[str, ...]
    """Definitions of the letters."""
    summary: str

    def rows(self) -> dict[str, str]:
        """The printed lines, by their names."""
        return {
            "projection": f"o = {self.projection}",
            "target": f"t = {self.target}",
            "objective": f"L = {self.objective}",
            "input map": f"x = {self.input_map} ({'aligned' if self.aligned else 'mismatch with the projection'})",
            "step size": f"η = {self.step}",
            "decay": f"λ = {self.decay}",
            "update": f"{self.rule}, G = xᵀ L′(o)",
            "start": f"Y_0 = {self.start}",
            "read-out": self.readout,
            "parameters": f"{self.parameters:,} ({'loop-specific' if self.loop_specific else 'shared by all loops'})",
        }

    def __str__(self) -> str:
        lines = [f"  {key:<11} {value}" for key, value in self._lines()]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        return html_table(self._lines(), title=self._title())

    def _title(self) -> str:
        return self.name + (f": {self.summary}" if self.summary else "")

    def _lines(self) -> list[tuple[str, str]]:
        return [*self.rows().items(), *(("where", text) for text in self.where)]


def describe(loop: Loop) -> Description:
    """Describe a loop as a row of the paper's table. The row is read off the parts, so it cannot drift from the code.

    Where the steps of a loop have different parts, the symbols of a cell are joined by a bar.

    >>> import looptim as lo
    >>> row = lo.describe(lo.build("hyperloop", width=8, steps=3))
    >>> row.projection, row.decay, row.step, row.input_map, row.objective, row.aligned
    ('H_pre Y', 'I − H_res', '1', 'H_post', '−⟨t, o⟩', False)
    """
    require("loop", loop, Loop)
    steps = loop.schedule()
    rules = [t.rule for t in steps]
    parts = [[t.projection, t.write, t.rule.step, t.rule.decay, t.rule, t.objective, t.target] for t in steps]
    where = [getattr(part, "where", "") for part in itertools.chain.from_iterable(parts)]
    return Description(
        name=loop.name,
        projection=_join(symbol(t.projection) for t in steps),
        decay=_join(symbol(rule.decay) for rule in rules),
        step=_join(symbol(rule.step) for rule in rules),
        input_map=_join(map(input_map, steps)),
        objective=_join(symbol(t.objective) for t in steps),
        target=_join("Blocks(o)" if t.target is None else symbol(t.target) for t in steps),
        rule=_join(map(symbol, rules)),
        rule_name=_join(rule.name or re.sub(r"(?<!^)(?=[A-Z])", " ", type(rule).__name__).lower() for rule in rules),
        aligned=diagnose_maps(loop).aligned,
        loop_specific=not loop.shared,
        start=symbol(loop.start),
        readout=symbol(loop.readout),
        parameters=sum(p.numel() for p in loop.parameters()),
        where=tuple(dict.fromkeys(filter(None, where))),
        summary=loop.summary,
    )


def _join(symbols: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(symbols))
