"""Chained assignments: a task in which the right depth of every token is known."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

from ..tasks import Knob
from .task import Graded, GradedTask, canonical

NAMES = string.ascii_letters + "".join(c for c in string.punctuation if c not in "<>")
"""The 82 names of statements; a problem uses each at most once."""
VALUES = string.digits


@final
class Deref(GradedTask):
    """Statements `name reference`; a reference is a value or the name of an earlier statement.

    A statement is two tokens (form B), or with `pairs` (form A) one position that reads both: the number
    `name * vocab_size + reference`, for a model with `model.pairs`. The problems are the same.

    `chains` chains of `hops` statements each are merged in a random order that keeps each chain's own. The first
    statement of a chain refers to a value, one per chain, every later one to the chain's statement before, by name;
    there are as many names as statements, given at random. The target at every reference is its chain's value, so a
    token needs d = 0 to `hops` - 1 hops, all equally frequent. R loops can follow R hops one after another, or 2^R - 1
    by pointer doubling.

    What shortcuts score with 6 chains of 10, by hops 1, 2, 3, 4, 5 and 6 to 9: a guess among the values seen so far
    .24 .19 .18 .17 .17 .17, the latest value .39 .23 .19 .17 .17 .17; whoever solves J hops at most .30 at J + 1.
    `shortcut_scores` measures the first two at any knobs.

    The form of a problem is the order in which its chains take turns, whatever names and values they have.

    >>> Deref({"chains": 2, "hops": 3}).difficulty_of("a0b1cadc")
    [-1, 0, -1, 0, -1, 1, -1, 2]
    """

    name: ClassVar[str] = "deref"
    table: ClassVar[Mapping[str, Knob]] = {"chains": Knob(6, 2, 10), "hops": Knob(6, 2, 41), "pairs": Knob(False)}
    unit: ClassVar[str] = "hops"

    def __init__(self, options: Mapping[str, Any], *, fold: int = 0):
        super().__init__(options, fold=fold)
        self.chains, self.hops, self.pairs = (self.knobs[name] for name in ("chains", "hops", "pairs"))
        statements = self.chains * self.hops
        if statements > len(NAMES):
            raise ValueError(
                f"task 'deref' has {len(NAMES)} names, but chains * hops is {statements}; lower one of them"
            )
        self.levels, self.length = range(self.hops), 2 * statements

    def forms(self, rng: random.Random) -> Iterator[tuple[str, list[int]]]:
        turns = [chain for chain in range(self.chains) for _ in range(self.hops)]
        while True:
            rng.shuffle(turns)
            yield f"{self.hops}:{canonical(turns)}", turns

    def spell(self, form: list[int], rng: random.Random) -> Graded:
        names, values = rng.sample(NAMES[: len(form)], len(form)), rng.sample(VALUES, self.chains)
        latest = list(values)
        text = []
        for name, chain in zip(names, form, strict=True):
            text += [name, latest[chain]]
            latest[chain] = name
        return Graded("".join(text), "".join(values[chain] for chain in form))

    def difficulty_of(self, text: str) -> list[int]:
        hops: dict[str, int] = {}
        for name, reference in zip(text[::2], text[1::2], strict=True):
            hops[name] = 0 if reference in VALUES else hops[reference] + 1
        return [level for each in hops.values() for level in (-1, each)]

    def shortcuts(self, problem: Graded) -> Mapping[str, list[float]]:
        seen: list[str] = []
        guess, latest = [], []
        for reference, answer in zip(problem.text[1::2], problem.answers, strict=True):
            seen += [reference] if reference in VALUES else []
            guess.append(1 / len(seen))
            latest.append(float(answer == seen[-1]))
        return {"guess among the values seen": guess, "latest value": latest}
