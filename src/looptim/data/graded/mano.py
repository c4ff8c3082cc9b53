"""Mano: arithmetic in the head, on prefix expressions."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

from ..tasks import Knob
from .task import NUMERALS, Graded, GradedTask

OPERATIONS = "+-*"
DIGITS = string.ascii_letters
"""A number is one token, a letter."""


@final
class Mano(GradedTask):
    """Prefix expressions of + - * modulo 23: `2+b*cd` is 1 + 2 * 3 = 7, of two operations.

    The number l of operations, as one token, is uniform from `fewest` to `operations`; an operation with n more below
    it gives a uniform number of them to its left side. Operands are uniform numbers below `modulus`, one token each.
    The published task asks for the value at the end and is tested at l = `operations` alone: here that is the
    difficulty `operations`, which only whole expressions have. The target is at every operand that completes an
    operation: the value of the largest expression that ends there, whose number of operations is the difficulty.

    Reference: Zhu et al., "Scaling latent reasoning via looped language models" (Ouro), section 6, after Allen-Zhu,
    "Physics of language models, part 4.1".

    >>> Mano({}).difficulty_of("3-+bc*de")
    [-1, -1, -1, -1, 1, -1, -1, 3]
    """

    name: ClassVar[str] = "mano"
    table: ClassVar[Mapping[str, Knob]] = {
        "operations": Knob(10, 1, 35),
        "fewest": Knob(1, 1, 35),
        "modulus": Knob(23, 2, 52),
    }
    unit: ClassVar[str] = "operations"

    def __init__(self, options: Mapping[str, Any], *, fold: int = 0):
        super().__init__(options, fold=fold)
        most, fewest, self.modulus = self.knobs["operations"], self.knobs["fewest"], self.knobs["modulus"]
        if fewest > most:
            raise ValueError(f"knob 'fewest' of task 'mano' must be at most 'operations' ({most}), got {fewest}")
        self.levels, self.length = range(1, most + 1), 2 * most + 2

    def forms(self, rng: random.Random) -> Iterator[tuple[str, str]]:
        while True:
            number = rng.randint(self.knobs["fewest"], self.knobs["operations"])
            text = NUMERALS[number] + self._expression(rng, number)
            yield f"{self.modulus}:{text}", text

    def _expression(self, rng: random.Random, operations: int) -> str:
        if not operations:
            return DIGITS[rng.randrange(self.modulus)]
        operation, left = rng.choice(OPERATIONS), rng.randrange(operations)
        return operation + self._expression(rng, left) + self._expression(rng, operations - 1 - left)

    def spell(self, form: str, rng: random.Random) -> Graded:
        return Graded(form, "".join(DIGITS[value] for size, value, _ in self._ends(form) if size))

    def difficulty_of(self, text: str) -> list[int]:
        ends = iter(self._ends(text))
        return [-1, *((next(ends)[0] or -1) if character in DIGITS else -1 for character in text[1:])]

    def shortcuts(self, problem: Graded) -> Mapping[str, list[float]]:
        ends, operands = self._ends(problem.text), [character for character in problem.text[1:] if character in DIGITS]
        asked = [(DIGITS[last], operand) for (size, _, last), operand in zip(ends, operands, strict=True) if size]
        return {
            "zero": [float(answer == DIGITS[0]) for answer in problem.answers],
            "the last operand": [float(operand == a) for (_, operand), a in zip(asked, problem.answers, strict=True)],
            "the last operation": [float(last == a) for (last, _), a in zip(asked, problem.answers, strict=True)],
            "guess": [1 / self.modulus] * len(asked),
        }

    def _ends(self, text: str) -> list[tuple[int, int, int]]:
        """Of every operand: operations of the largest expression that ends there, its value, and the smallest's."""
        waiting: list[list[Any]] = []
        found = []
        for character in text[1:]:
            if character in OPERATIONS:
                waiting.append([character])
                continue
            size, value, smallest = 0, DIGITS.index(character), None
            # An operation that has its left side takes what ends here as its right one.
            while waiting and len(waiting[-1]) > 1:
                operation, left, below = waiting.pop()
                value = {"+": left + value, "-": left - value, "*": left * value}[operation] % self.modulus
                size += below + 1
                smallest = value if smallest is None else smallest
            if waiting:
                waiting[-1] += [value, size]
            found.append((size, value, value if smallest is None else smallest))
        return found
