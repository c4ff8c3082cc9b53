"""Capo: facts to be stored, the negative control."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

from ..tasks import Knob
from .task import NUMERALS, Graded, GradedTask

LETTERS = 4
"""Of a name."""
SPREAD = 180_001
"""Prime to 26^4, so that neighbors in the list of people have different names."""
FIRST_VALUE = 128


@final
class Capo(GradedTask):
    """Biographies to be learned by heart: a name of four letters, then its attributes, asked in a random order.

    Each of `people` has `attributes` with one of `values` values, uniform and independent, the same for every seed. The
    target at the mark of an attribute is its value; values are not written into the text. Which attribute it is stands
    for the difficulty, though all are equally hard: there is nothing to compute, so that loops should gain nothing.

    Facts are what is learned, so that those that are held out are the same; the form of a problem is a person *and* the
    order of the attributes, and orders that are held out are never trained on.

    Bits stored, with a held-out loss of L nats: people * attributes * (log2 values - L / log 2). The published figure
    is about 2 bits per parameter; it counts names too.

    Reference: Allen-Zhu and Li, "Physics of language models, part 3.3"; Zhu et al. (Ouro), section 6.

    >>> Capo({"attributes": 4}).difficulty_of("abcd3012")
    [-1, -1, -1, -1, 3, 0, 1, 2]
    """

    name: ClassVar[str] = "capo"
    table: ClassVar[Mapping[str, Knob]] = {
        "people": Knob(1000, 2, 26**LETTERS),
        "attributes": Knob(6, 4, 10),
        "values": Knob(64, 2, 128),
    }
    unit: ClassVar[str] = "attribute"
    serial: ClassVar[bool] = False

    def __init__(self, options: Mapping[str, Any], *, fold: int = 0):
        super().__init__(options, fold=fold)
        self.people, self.attributes, self.values = (self.knobs[name] for name in ("people", "attributes", "values"))
        self.levels, self.length = range(self.attributes), LETTERS + self.attributes

    def forms(self, rng: random.Random) -> Iterator[tuple[str, tuple[int, list[int]]]]:
        while True:
            person, order = rng.randrange(self.people), rng.sample(self.levels, self.attributes)
            yield f"{person}:{order}", (person, order)

    def spell(self, form: tuple[int, list[int]], rng: random.Random) -> Graded:
        person, order = form
        known = random.Random(f"capo:{person}").choices(range(self.values), k=self.attributes)
        number, name = person * SPREAD % 26**LETTERS, ""
        for _ in range(LETTERS):
            number, letter = divmod(number, 26)
            name += chr(ord("a") + letter)
        text = name + "".join(NUMERALS[attribute] for attribute in order)
        return Graded(text, "".join(chr(FIRST_VALUE + known[attribute]) for attribute in order))

    def difficulty_of(self, text: str) -> list[int]:
        return [-1] * LETTERS + [NUMERALS.index(mark) for mark in text[LETTERS:]]

    def shortcuts(self, problem: Graded) -> Mapping[str, list[float]]:
        return {"guess": [1 / self.values] * len(problem.answers)}

    def bits(self, loss: float) -> float:
        return self.people * self.attributes * max(0.0, math.log2(self.values) - loss / math.log(2))
