"""Tracking the state of a small group."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

from ..tasks import Knob
from .task import Graded, GradedTask

Permutation = tuple[int, ...]


@final
class Group(GradedTask):
    """Products of permutations: the target at every element is the product of all up to it.

    A token is an element of the symmetric group of `items` things, or with `even` of the alternating one: S3 with 6
    elements by default, A5 with 60 is `items = 5, even = true`. Elements are uniform, `length` of them; the product is
    "first the earlier ones": (g_t ... g_2 g_1)(x). The difficulty of place t is ceil(log2 t), the rounds in which
    neighbors can be multiplied in pairs until t of them are one; it asks for 2^(d-1) < t <= 2^d elements. S5 and A5
    are not solvable, so that no circuit of constant depth tracks them (under the usual assumptions); S3 is.

    Reference: Merrill et al., "The illusion of state in state-space models", 2024; Barrington, 1989.

    >>> Group({"length": 5}).difficulty_of("!#$%&")
    [0, 1, 2, 2, 3]
    """

    name: ClassVar[str] = "group"
    table: ClassVar[Mapping[str, Knob]] = {"items": Knob(3, 3, 5), "even": Knob(False), "length": Knob(32, 2, 4096)}
    unit: ClassVar[str] = "doublings"

    def __init__(self, options: Mapping[str, Any], *, fold: int = 0):
        super().__init__(options, fold=fold)
        members = itertools.permutations(range(self.knobs["items"]))
        kept = [each for each in members if not self.knobs["even"] or _sign(each) > 0]
        # Printable characters come first; S5 needs 120.
        self.elements = {element: chr(33 + index) for index, element in enumerate(kept)}
        self.named = {name: element for element, name in self.elements.items()}
        self.length = self.knobs["length"]
        self.levels = range((self.length - 1).bit_length() + 1)

    def forms(self, rng: random.Random) -> Iterator[tuple[str, str]]:
        names = list(self.named)
        while True:
            text = "".join(rng.choices(names, k=self.length))
            yield f"{len(names)}:{text}", text

    def spell(self, form: str, rng: random.Random) -> Graded:
        return Graded(form, "".join(self.elements[each] for each in itertools.accumulate(self.read(form), _then)))

    def read(self, text: str) -> list[Permutation]:
        """The elements of a text."""
        return [self.named[name] for name in text]

    def difficulty_of(self, text: str) -> list[int]:
        return [place.bit_length() for place in range(len(text))]

    def shortcuts(self, problem: Graded) -> Mapping[str, list[float]]:
        elements = self.read(problem.text)
        last_two = [elements[0], *itertools.starmap(_then, itertools.pairwise(elements))]
        order = len(self.elements)

        def score(said: Sequence[Permutation]) -> list[float]:
            return [float(self.elements[each] == answer) for each, answer in zip(said, problem.answers, strict=True)]

        return {
            "the last element": score(elements),
            "the last two": score(last_two),
            "guess of the right sign": [1 / order if self.knobs["even"] else 2 / order] * len(elements),
        }


def _then(first: Permutation, second: Permutation) -> Permutation:
    """One permutation after another."""
    return tuple(second[place] for place in first)


def _sign(permutation: Permutation) -> int:
    return (-1) ** sum(a > b for a, b in itertools.combinations(permutation, 2))
