"""Depo: successors on a cycle."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

from ..tasks import Knob
from .task import NUMERALS, Graded, GradedTask, canonical

NAMES = string.ascii_letters


@final
class Depo(GradedTask):
    """The k-th successor on a random cycle: `bcabca2a3b` asks for the second after a, c, and the third after b, b.

    A cycle through `nodes` nodes is given as its edges, `from to`, in random order. Then come `queries` of two tokens,
    k and a node, k uniform from `fewest` to `hops`; the target at the node is the one k steps on. Every query is
    supervised, and what it asks does not depend on the others. Answers are not written into the text.

    The form of a problem is the order of its edges up to the names of the nodes.

    Reference: Allen-Zhu, "Physics of language models, part 4.1".

    >>> Depo({"nodes": 4, "hops": 3}).difficulty_of("bccddaab2a3b")
    [-1, -1, -1, -1, -1, -1, -1, -1, -1, 2, -1, 3]
    """

    name: ClassVar[str] = "depo"
    table: ClassVar[Mapping[str, Knob]] = {
        "nodes": Knob(16, 4, len(NAMES)),
        "hops": Knob(8, 1, 35),
        "fewest": Knob(1, 1, 35),
        "queries": Knob(16, 1, 1024),
    }
    unit: ClassVar[str] = "hops"

    def __init__(self, options: Mapping[str, Any], *, fold: int = 0):
        super().__init__(options, fold=fold)
        self.nodes, hops, fewest = self.knobs["nodes"], self.knobs["hops"], self.knobs["fewest"]
        if not fewest <= hops < self.nodes:
            raise ValueError(
                f"knobs of task 'depo' must be fewest <= hops < nodes, got {fewest}, {hops} and {self.nodes}"
            )
        self.levels, self.length = range(fewest, hops + 1), 2 * self.nodes + 2 * self.knobs["queries"]

    def forms(self, rng: random.Random) -> Iterator[tuple[str, list[int]]]:
        cycle = list(range(self.nodes))
        edges = [(cycle[at - 1], node) for at, node in enumerate(cycle)]
        while True:
            rng.shuffle(edges)
            ends = [end for edge in edges for end in edge]
            yield canonical(ends), ends

    def spell(self, form: list[int], rng: random.Random) -> Graded:
        names = rng.sample(NAMES, self.nodes)
        queries = [(rng.choice(self.levels), rng.choice(names)) for _ in range(self.knobs["queries"])]
        text = "".join(names[node] for node in form)
        after = dict(zip(text[::2], text[1::2], strict=True))
        answers = "".join(_follow(after, node, k) for k, node in queries)
        return Graded(text + "".join(NUMERALS[k] + node for k, node in queries), answers)

    def difficulty_of(self, text: str) -> list[int]:
        start = 2 * self.nodes
        return [-1] * start + [level for k in text[start::2] for level in (-1, NUMERALS.index(k))]

    def shortcuts(self, problem: Graded) -> Mapping[str, list[float]]:
        text, queries = problem.text[: 2 * self.nodes], problem.text[2 * self.nodes :]
        after = dict(zip(text[::2], text[1::2], strict=True))
        asked = list(zip(queries[::2], queries[1::2], problem.answers, strict=True))
        return {
            "one step": [float(after[node] == answer) for _, node, answer in asked],
            "one step too few": [float(_follow(after, node, NUMERALS.index(k) - 1) == a) for k, node, a in asked],
            "guess among the other nodes": [1 / (self.nodes - 1)] * len(asked),
        }


def _follow(after: Mapping[str, str], node: str, steps: int) -> str:
    for _ in range(steps):
        node = after[node]
    return node
