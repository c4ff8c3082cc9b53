"""The runs that the recurrence-equivalence exponent is fitted to: widths by budgets by loops by transitions."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import Field, model_validator

from ..config import Strict, parse_layout


class Looped(Strict):
    """A transition to place on the scale."""

    preset: str
    options: dict[str, Any] = Field({})
    set: tuple[str, ...] = Field((), description="Its own changes to the base, as key=value.")


class Member(NamedTuple):
    """A variant of the grid."""

    transition: str | None
    """The transition; None if not looped, since all transitions share these runs."""
    loops: int
    width: str
    budget: float

    @property
    def name(self) -> str:
        return f"{self.transition or 'not looped'} x{self.loops}, {self.width}, budget {self.budget:g}"


class PhiGrid(Strict):
    """The table [phi] of a study file, which generates its variants.

    >>> widths, looped = {"narrow": [], "wide": ["model.width=64"]}, {"vanilla": {"preset": "vanilla"}}
    >>> grid = PhiGrid(layouts={"1": "4", "2": "1-1x2-1"}, budgets=[1, 2], widths=widths, transitions=looped)
    >>> len(grid.members()), grid.members()[0].name
    (8, 'not looped x1, narrow, budget 1')
    """

    layouts: dict[int, str] = Field(description="Layouts by number of loops; that of 1 is not looped.")
    budgets: tuple[float, ...] = Field(description="Of the study's tokens.")
    widths: dict[str, tuple[str, ...]] = Field(description="The changes that make each width, as key=value.")
    transitions: dict[str, Looped] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_a_law(self) -> PhiGrid:
        depths = {
            layout: sum(segment.blocks * (segment.loops or 1) for segment in parse_layout(layout))
            for layout in self.layouts.values()
        }
        if len({*depths.values()}) > 1:
            said = ", ".join(f"{layout!r} {depth}" for layout, depth in depths.items())
            raise ValueError(f"phi.layouts unroll to different depths ({said}); phi compares loops at one depth")
        if 1 not in self.layouts or "x" in self.layouts[1]:
            raise ValueError("phi.layouts has no plain layout for 1 loop, which every transition is measured against")
        if len(self.layouts) < 2:
            raise ValueError("phi.layouts has 1 loop only; give at least another number of loops")
        for what, values in (("budget", self.budgets), ("width", self.widths)):
            if len(set(values)) < 2:
                raise ValueError(f"one {what} does not tell parameters from tokens; give phi.{what}s at least two")
        return self

    def members(self) -> list[Member]:
        """The variants: unlooped ones first, then transition by transition, so that partial results can be fitted."""
        return [
            Member(transition, loops, width, budget)
            for transition in (None, *self.transitions)
            for loops in self.layouts
            for budget in self.budgets
            for width in self.widths
            if (loops == 1) == (transition is None)
        ]

    def variants(self) -> dict[str, dict[str, Any]]:
        """The variants as a study file would list them."""
        found = {}
        for member in self.members():
            looped = None if member.transition is None else self.transitions[member.transition]
            own = {"preset": "none"} if looped is None else {"preset": looped.preset, "options": looped.options}
            changes = (*self.widths[member.width], *(() if looped is None else looped.set))
            found[member.name] = {
                **own,
                "layout": self.layouts[member.loops],
                "budget": member.budget,
                "set": changes,
            }
        return found
