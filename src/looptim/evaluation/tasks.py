"""Our synthetic reasoning tasks, by generation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..base.console import Progress
from ..data import TASKS, evaluate_exact_match
from ..data.synthetic import knobs_of
from ..data.tasks import STOP
from ..generation import complete
from .answers import Answers

if TYPE_CHECKING:
    from .subject import Subject

COUNT = 200
"""Held-out problems per task, unless a limit says otherwise."""


def settings(name: str, trained: Mapping[str, Any]) -> dict[str, Any]:
    """What a result depends on; options come from `trained`, by task, or else are the task's defaults."""
    return {"seeds": {"problems": 0}, "knobs": knobs_of(TASKS[name], trained.get(name, {}))}


def run(
    name: str, subject: Subject, settings: dict[str, Any], answers: Answers, *, batch_size: int, progress: Progress
) -> dict[str, Any]:
    """The share of held-out problems that the model completes exactly."""
    knobs, number = settings["knobs"], settings["limit"] or COUNT
    solutions = [TASKS[name].example("valid", 0, index, **knobs).answer for index in range(number)]
    room = max(len(subject.tokenizer.encode(solution + STOP)) for solution in solutions)
    context = subject.identity["context_length"]
    seen = {"requests": number, "cut": 0, "longest": 0}

    def generate(prompts: list[str]) -> list[str]:
        lengths = [len(subject.tokenizer.encode(prompt)) + room for prompt in prompts]
        seen.update(cut=sum(length > context for length in lengths), longest=max(lengths))
        fitting = {prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= context}
        waiting = [prompt for prompt in prompts if prompt in fitting and prompt not in answers.known]
        progress.expect(len(prompts), len(prompts) - len(waiting))
        for first in range(0, len(waiting), batch_size):
            some = waiting[first : first + batch_size]
            texts = complete(
                subject.model,
                subject.tokenizer,
                some,
                max_new_tokens=room,
                batch_size=batch_size,
                loops=subject.loops,
                depth=subject.depth,
            )
            for prompt, text in zip(some, texts, strict=True):
                answers.add(prompt, text)
            progress.advance(len(some))
        # A problem that does not fit counts as wrong, since half of it would not determine the answer.
        return [answers.known[prompt] if prompt in fitting else "" for prompt in prompts]

    share = evaluate_exact_match(name, generate, count=number, knobs=knobs)
    error = math.sqrt(share * (1 - share) / (number - 1)) if number > 1 else None
    notes = []
    if seen["cut"]:
        notes.append(
            f"{name}: {seen['cut']} of {number} problems do not fit the context of {context} tokens "
            f"(the longest needs {seen['longest']}) and count as wrong"
        )
    results = {"exact_match,none": share} | ({} if error is None else {"exact_match_stderr,none": error})
    return {
        "results": results,
        "parts": {},
        "samples": {name: number},
        "context": seen,
        "sandbox": None,
        "notes": notes,
    }
