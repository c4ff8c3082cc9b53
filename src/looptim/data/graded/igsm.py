"""Symbolic i-GSM: a graph of assignments modulo 7."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, final

from ..tasks import Knob
from .task import Graded, GradedTask, canonical

NAMES = string.ascii_letters
MODULUS = 7


class Statement(NamedTuple):
    """A name, given as a number, and what it is: a number, or two names with an operation between them."""

    name: int
    value: int | None
    operation: str = ""
    left: int = -1
    right: int = -1


@final
class IGSM(GradedTask):
    """Assignments modulo 7 in any order, then questions: `c=b*a;a=4;b=a+a;?cab` asks for c = 4, a = 4 and b = 1.

    A graph of `statements` names. A name of difficulty 0 is a number; one of difficulty d has a name of difficulty
    d - 1 on one side of + - or *, and a name of any lower one on the other. There is a name of each difficulty from 0
    to `depth`, and the others have uniform ones: the depths are drawn first. The statements are shuffled, or with
    `shuffled = false` in an order in which every name is known when it is used; then every name is asked for, in a
    random order, and the target is at each. The published task asks for one, without a chain of thought either.

    The form of a problem is its statements up to their names.

    Reference: Saunshi et al., "Reasoning with latent thoughts", arXiv 2502.17416, after Ye et al., "Physics of language
    models, part 2.1".

    >>> IGSM({"depth": 2, "statements": 3}).difficulty_of("c=b*a;a=4;b=a+a;?cab")[-4:]
    [-1, 2, 0, 1]
    """

    name: ClassVar[str] = "igsm"
    table: ClassVar[Mapping[str, Knob]] = {
        "depth": Knob(4, 1, 32),
        "statements": Knob(12, 3, len(NAMES)),
        "shuffled": Knob(True),
    }
    unit: ClassVar[str] = "depth"

    def __init__(self, options: Mapping[str, Any], *, fold: int = 0):
        super().__init__(options, fold=fold)
        self.depth, self.statements = self.knobs["depth"], self.knobs["statements"]
        if self.statements <= self.depth:
            raise ValueError(
                f"knob 'statements' of task 'igsm' must be more than 'depth' ({self.depth}), got {self.statements}"
            )
        self.levels, self.length = range(self.depth + 1), 7 * self.statements + 1

    def forms(self, rng: random.Random) -> Iterator[tuple[str, list[Statement]]]:
        while True:
            statements = self._draw(rng)
            parts = [part for each in statements for part in (each.name, each.left, each.right) if part >= 0]
            values = ",".join(f"{each.value}{each.operation}" for each in statements)
            yield f"{canonical(parts)}:{values}", statements

    def _draw(self, rng: random.Random) -> list[Statement]:
        more = self.statements - self.depth - 1
        levels = sorted([*self.levels, *rng.choices(self.levels, k=more)])
        statements = []
        for name, level in enumerate(levels):
            if not level:
                statements.append(Statement(name, rng.randrange(MODULUS)))
                continue
            deep = rng.choice([other for other in range(name) if levels[other] == level - 1])
            # The same name on both sides would often be zero, and is there only where there is no other.
            others = [other for other in range(name) if levels[other] < level and other != deep]
            sides = [deep, rng.choice(others or [deep])]
            rng.shuffle(sides)
            statements.append(Statement(name, None, rng.choice("+-*"), *sides))
        if self.knobs["shuffled"]:
            rng.shuffle(statements)
        return statements

    def spell(self, form: list[Statement], rng: random.Random) -> Graded:
        names = rng.sample(NAMES, self.statements)
        text = ""
        for name, value, operation, left, right in form:
            side = str(value) if value is not None else f"{names[left]}{operation}{names[right]}"
            text += f"{names[name]}={side};"
        asked = rng.sample(names, self.statements)
        text += f"?{''.join(asked)}"
        values = _solve(text)
        return Graded(text, "".join(str(values[name][0]) for name in asked))

    def difficulty_of(self, text: str) -> list[int]:
        values = _solve(text)
        start = text.index("?") + 1
        return [-1] * start + [values[name][1] for name in text[start:]]

    def shortcuts(self, problem: Graded) -> Mapping[str, list[float]]:
        text, asked = problem.text.split("?")
        values, sides = _solve(problem.text), _sides(text)
        first = [values[side[0]][0] if len(side := sides[name]) > 1 else int(side) for name in asked]
        return {
            "zero": [float(answer == "0") for answer in problem.answers],
            "the value of its left side": [float(str(a) == b) for a, b in zip(first, problem.answers, strict=True)],
            "guess": [1 / MODULUS] * len(asked),
        }


def _sides(statements: str) -> dict[str, str]:
    return {each[0]: each[2:] for each in statements.split(";") if each}


def _solve(text: str) -> dict[str, tuple[int, int]]:
    """The value and the difficulty of every name."""
    sides = _sides(text.partition("?")[0])
    known: dict[str, tuple[int, int]] = {}

    def value(name: str) -> tuple[int, int]:
        if name not in known:
            side = sides[name]
            if len(side) == 1:
                known[name] = int(side), 0
            else:
                (a, deep), (b, deeper) = value(side[0]), value(side[2])
                found = {"+": a + b, "-": a - b, "*": a * b}[side[1]] % MODULUS
                known[name] = found, 1 + max(deep, deeper)
        return known[name]

    for name in sides:
        value(name)
    return known
