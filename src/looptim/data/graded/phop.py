"""Dense p-hop induction."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

from ..tasks import Knob
from .task import NUMERALS, Graded, GradedTask, canonical


@final
class PHop(GradedTask):
    """Dense p-hop induction: from every letter p hops back, each to behind the last place of the same letter.

    find_1(v, i) = max({0} or {j <= i: v_{j-1} = v_i}), find_p = find_1 of find_{p-1}; the answer at i is v at
    find_p(v, i). Reference: Saunshi et al., "Reasoning with latent thoughts", arXiv 2502.17416, after Sanford et al.,
    "Transformers, parallel computation, and logarithmic depth", 2024.

    A problem is p, as one token, and `length` letters of an alphabet of `symbols`; p is uniform from `fewest` to
    `hops`. The hops of the last letter are drawn first, each to another letter than the one before, and set at random
    distances into filler that respects them: behind a hop its letter does not come again before it is needed. Neighbors
    differ everywhere, or a hop would lead to where it began. The published task asks at the last letter only; here the
    target is at every letter that has an answer.

    Few letters leave room for guessing: with 4 of them the letter itself is right in 59% of the answers at p = 2.

    The form of a problem is p and the text up to the names of its letters.

    >>> PHop({"hops": 2, "length": 8}).difficulty_of("1abcabdca")
    [-1, -1, -1, -1, 1, 1, -1, 1, 1]
    """

    name: ClassVar[str] = "phop"
    table: ClassVar[Mapping[str, Knob]] = {
        "hops": Knob(8, 1, 32),
        "fewest": Knob(1, 1, 32),
        "length": Knob(64, 4, 4096),
        "symbols": Knob(4, 4, 26),
    }
    unit: ClassVar[str] = "hops"

    def __init__(self, options: Mapping[str, Any], *, fold: int = 0):
        super().__init__(options, fold=fold)
        hops, fewest, size = self.knobs["hops"], self.knobs["fewest"], self.knobs["length"]
        if fewest > hops:
            raise ValueError(f"knob 'fewest' of task 'phop' must be at most 'hops' ({hops}), got {fewest}")
        if size < 3 * hops + 1:
            raise ValueError(f"knob 'length' of task 'phop' must be at least 3 * hops + 1 = {3 * hops + 1}, got {size}")
        self.levels, self.length = range(fewest, hops + 1), size + 1

    def forms(self, rng: random.Random) -> Iterator[tuple[str, tuple[int, list[int]]]]:
        while True:
            p, text = self._draw(rng)
            yield f"{p}:{canonical(text)}", (p, text)

    def _draw(self, rng: random.Random) -> tuple[int, list[int]]:
        p, letters = rng.choice(self.levels), range(self.knobs["symbols"])
        chain = [rng.choice(letters)]
        for _ in range(p):
            chain.append(rng.choice([letter for letter in letters if letter != chain[-1]]))
        text: list[int] = []
        for back, gap in zip(range(p, -1, -1), _gaps(rng, chain, self.knobs["length"]), strict=True):
            # Before hop number `back` stands filler without the letter that it must not meet.
            follows, forbidden = (chain[back - 1], chain[back]) if back else (chain[0], chain[0])
            if back == p:
                forbidden = None
            for place in range(gap):
                barred = {forbidden, text[-1] if text else None, follows if place == gap - 1 else None}
                text.append(rng.choice([letter for letter in letters if letter not in barred]))
            text += chain[back - 1 : back + 1] if back else [chain[0]]
        return p, text

    def spell(self, form: tuple[int, list[int]], rng: random.Random) -> Graded:
        p, letters = form
        names = rng.sample(string.ascii_lowercase[: self.knobs["symbols"]], self.knobs["symbols"])
        text = "".join(names[letter] for letter in letters)
        return Graded(NUMERALS[p] + text, "".join(text[at] for at in _hop(text, p) if at is not None))

    def difficulty_of(self, text: str) -> list[int]:
        p = NUMERALS.index(text[0])
        return [-1] + [-1 if at is None else p for at in _hop(text[1:], p)]

    def shortcuts(self, problem: Graded) -> Mapping[str, list[float]]:
        p, text = NUMERALS.index(problem.text[0]), problem.text[1:]
        asked = [at for at, found in enumerate(_hop(text, p)) if found is not None]

        def score(places: Sequence[int | None]) -> list[float]:
            said = [None if (to := places[at]) is None else text[to] for at in asked]
            return [float(letter == answer) for letter, answer in zip(said, problem.answers, strict=True)]

        return {
            "the letter itself": score(range(len(text))),
            "the letter before": score([None, *range(len(text) - 1)]),
            "one hop": score(_hop(text, 1)),
            "one hop too few": score(_hop(text, p - 1)),
            "guess among the letters": [1 / self.knobs["symbols"]] * len(asked),
        }


def _gaps(rng: random.Random, chain: Sequence[int], length: int) -> list[int]:
    """Lengths of filler before each hop, the last first, and before the end; any that fit are equally likely."""
    hops = len(chain) - 1
    # Two hops of which one ends as the other begins must not touch, or neighbors would be equal.
    least = [0] * (hops + 1)
    for back in range(hops - 1, 0, -1):
        least[hops - back] = int(chain[back + 1] == chain[back - 1])
    free = length - 2 * hops - 1 - sum(least)
    cuts = sorted(rng.sample(range(free + hops), hops))
    parts = [b - a - 1 for a, b in zip([-1, *cuts], [*cuts, free + hops], strict=True)]
    return [a + b for a, b in zip(parts, least, strict=True)]


def _hop(text: str, times: int) -> list[int | None]:
    """Where so many hops lead from every letter; None where there are not so many."""
    last: dict[str, int] = {}
    once: list[int | None] = []
    for at, letter in enumerate(text):
        once.append(last[letter] + 1 if letter in last else None)
        last[letter] = at
    found: list[int | None] = list(range(len(text)))
    for _ in range(times):
        found = [None if at is None else once[at] for at in found]
    return found
