"""What a task is whose every answer has a known difficulty."""

from __future__ import annotations

import abc
import itertools
import random
import string
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..corpus import Split
from ..tasks import DRAWS, Knob, settle_knobs, split_of

FOLDS = 10
"""Number of folds; each holds out a tenth of the problems."""

NUMERALS = string.digits + string.ascii_uppercase
"""Numbers from 0 to 35 as one token each."""


class Graded(NamedTuple):
    """A problem: one token a character, and the answers in the order in which they are asked for."""

    text: str
    answers: str


def canonical(items: Iterable[Hashable]) -> str:
    """A sequence up to the names of its items.

    >>> canonical("abca")
    '0 1 2 0'
    """
    order: dict[Hashable, str] = {}
    return " ".join(order.setdefault(item, str(len(order))) for item in items)


class GradedTask(abc.ABC):
    """A family of problems that ask for an answer at many positions, each of a known difficulty.

    A problem is drawn in two steps: its form, whose hash alone says whether it is held out, and how that form is
    spelled (which letter stands for what). The splits are therefore disjoint, for every seed and whatever the names.
    """

    name: ClassVar[str]
    table: ClassVar[Mapping[str, Knob]]
    """Its knobs."""
    unit: ClassVar[str]
    """What its difficulty counts, as the heading of a column."""
    serial: ClassVar[bool] = True
    """Whether R loops should be able to follow a difficulty of R, one after another, or of 2^R - 1 by doubling."""
    pairs: bool = False
    """Whether a position reads two characters."""
    levels: range
    """The difficulties there are."""
    length: int
    """Characters of the longest problem."""

    def __init__(self, options: Mapping[str, Any], *, fold: int = 0):
        self.knobs, self.fold = settle_knobs(self.name, self.table, options), fold
        if fold >= FOLDS:
            raise ValueError(f"data.valid_fold of task {self.name!r} is from 0 to {FOLDS - 1}, got {fold}")

    @abc.abstractmethod
    def forms(self, rng: random.Random) -> Iterator[tuple[str, Any]]:
        """Forms without end: of each what tells it from all others, as text, and whatever `spell` needs of it."""

    @abc.abstractmethod
    def spell(self, form: Any, rng: random.Random) -> Graded:
        """A problem of this form."""

    @abc.abstractmethod
    def difficulty_of(self, text: str) -> list[int]:
        """The difficulty of the answer at every character, -1 where none is asked for."""

    @abc.abstractmethod
    def shortcuts(self, problem: Graded) -> Mapping[str, list[float]]:
        """How likely each known shortcut is to be right at every answer of a problem."""

    def bits(self, loss: float) -> float | None:
        """Bits that a model has stored whose held-out loss is so many nats; None where nothing is to be stored."""
        return None

    def problem(self, split: Split, seed: int, index: int) -> Graded:
        """Problem `index` of a split: a pure function of its arguments."""
        rng = random.Random(f"{self.name}:{split}:{seed}:{index}")
        for identity, form in itertools.islice(self.forms(rng), DRAWS):
            if split_of(identity, self.fold) == split:
                return self.spell(form, rng)
        raise ValueError(f"task {self.name!r} has hardly any {split} problems at {self.knobs}; choose other knobs")

    def shortcut_scores(self, problems: int = 500) -> dict[str, list[float]]:
        """The score of every known shortcut on held-out problems, by difficulty."""
        sums: dict[str, np.ndarray] = {}
        asked = np.zeros(len(self.levels))
        for index in range(problems):
            problem = self.problem("valid", 0, index)
            places = [level - self.levels.start for level in self.difficulty_of(problem.text) if level >= 0]
            np.add.at(asked, places, 1)
            for name, scores in self.shortcuts(problem).items():
                np.add.at(sums.setdefault(name, np.zeros(len(self.levels))), places, scores)
        return {name: (total / np.maximum(asked, 1)).tolist() for name, total in sums.items()}
