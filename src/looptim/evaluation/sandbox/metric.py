"""The `code_eval` metric of lm-eval's tasks, from confined processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, final

from .run import GRACE, Limits, Outcome, run_program

TRIES = 3
"""How often a program is started that this machine has had no time to start."""


@final
class CodeEval:
    """What stands in for the `code_eval` metric of the stock tasks: the same numbers, from confined processes."""

    name = "code_eval"

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self.isolation: list[str] | None = None
        """The means of isolation that every program was under, once there was one."""
        self.count = 0

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,), **ignored: Any
    ) -> tuple[dict[str, float], dict[int, list[Outcome]]]:
        """pass@k over problems, each of a test and candidates, and how every program ended."""
        outcomes = {
            index: [self._run(candidate, test) for candidate in candidates]
            for index, (test, candidates) in enumerate(zip(references, predictions, strict=True))
        }
        for outcome in (outcome for row in outcomes.values() for outcome in row):
            before = outcome.isolation if self.isolation is None else self.isolation
            self.isolation = [name for name in before if name in outcome.isolation]
            self.count += 1
        numbers = [(len(row), sum(outcome.passed for outcome in row)) for row in outcomes.values()]
        scores = {
            f"pass@{wanted}": sum(pass_at_k(tried, right, wanted) for tried, right in numbers) / len(numbers)
            for wanted in k
            if all(tried >= wanted for tried, _ in numbers)
        }
        return scores, outcomes

    def _run(self, program: str, test: str) -> Outcome:
        """How a program ended; that this machine did not start it says nothing about it."""
        outcomes = (run_program(program, self.limits, test=test) for _ in range(TRIES))
        outcome = next((each for each in outcomes if each.isolation), None)
        if outcome is None:
            raise ValueError(
                f"a program that a model wrote was not started within {GRACE:g} s, {TRIES} times; evaluate again when "
                "this machine has time for it, and answers that are there are kept"
            )
        return outcome

    def describe(self) -> dict[str, Any]:
        """For the record of a result."""
        return {**asdict(self.limits), "isolation": self.isolation or [], "programs": self.count}


def pass_at_k(tried: int, right: int, k: int) -> float:
    """The chance that one of `k` of the tried programs is right, `1 - C(n - c, k) / C(n, k)`.

    >>> pass_at_k(4, 2, 1)
    0.5
    """
    return 1.0 if tried - right < k else 1.0 - math.comb(tried - right, k) / math.comb(tried, k)
