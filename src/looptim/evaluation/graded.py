"""Tasks of known difficulty: what a model answers, by difficulty and by the loops that are run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.console import Progress
from ..base.files import write_whole
from ..data import GRADED, Dataset, GradedDataset, open_data
from ..loading import load
from ..loop import Depth, Loop
from ..loop.depth import Fixed
from ..model import LoopedLM
from ..rundir import RunDir
from ..training.step import count_right

if TYPE_CHECKING:
    from .subject import Subject

LOOPS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
"""Numbers of loops that are tried besides the one of the training, for a transition that all loops share."""
BATCH = 50


def evaluate_hops(path: str | Path, *, problems: int) -> dict[str, Any]:
    """The share of right answers on held-out problems, written to the run: by loops, then by difficulty."""
    run = RunDir(path)
    model, _ = load(path)
    config = run.config()
    data = open_data(config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, progress=False)
    trained = next((segment.loops for segment in config.model.segments if segment.loops is not None), None)
    found = {trained or 1: _shares(model, data, None, problems)}
    if trained is not None and all(loop.shared for loop in model.loops if isinstance(loop, Loop)):
        found |= {loops: _shares(model, data, Fixed(loops), problems) for loops in LOOPS if loops != trained}
    share = _mean(found[trained or 1])
    record = {"problems": problems, "results": {"exact_match,none": share}, "loops": dict(sorted(found.items()))}
    write_whole(run.hops_file, json.dumps(record) + "\n")
    return record


def settings(name: str, trained: Mapping[str, Any]) -> dict[str, Any]:
    """What a result of `looptim evaluate` depends on: the knobs and the fold of the run, where it learned the task."""
    options = dict(trained.get(name, {}))
    fold = options.pop("valid_fold", 0)
    return {"seeds": {"problems": 0}, "knobs": GRADED[name](options, fold=fold).knobs, "valid_fold": fold}


def run(
    name: str, subject: Subject, settings: Mapping[str, Any], *, problems: int, progress: Progress
) -> dict[str, Any]:
    """The share of right answers, by difficulty and as the mean over difficulties."""
    if not isinstance(subject.model, LoopedLM):
        raise ValueError(f"task {name!r} is for models of looptim's own; give tasks of lm-eval to a decoder")
    task, config = GRADED[name](settings["knobs"], fold=settings["valid_fold"]), subject.model.config
    if task.pairs != config.pairs:
        raise ValueError(
            f"task {name!r} has pairs = {task.pairs} and the model pairs = {config.pairs}; they must agree"
        )
    needed = task.length // 2 if task.pairs else task.length
    data = GradedDataset(task, seq_len=min(needed, config.max_length), vocab_size=config.vocab_size)
    depth = subject.depth or (None if subject.loops is None else Fixed(subject.loops))
    progress.expect(problems, 0)
    shares = _shares(subject.model, data, depth, problems)
    progress.advance(problems)
    by_level = {f"difficulty {level},none": share for level, share in zip(task.levels, shares, strict=True)}
    return {
        "results": {"exact_match,none": _mean(shares), **by_level},
        "parts": {},
        "samples": {name: problems},
        "context": {"requests": problems, "cut": 0, "longest": needed},
        "sandbox": None,
        "notes": [],
    }


def _mean(shares: list[float]) -> float:
    """The mean over difficulties, each counted once, however many problems it has."""
    return sum(shares) / len(shares)


@torch.no_grad()
def _shares(model: LoopedLM, data: Dataset, depth: Depth | None, problems: int) -> list[float]:
    counts, device = [], next(model.parameters()).device
    for step in range(-(-problems // BATCH)):
        batch = data.batch("valid", seed=0, step=step, batch_size=BATCH)
        asked = data.difficulty_of(batch.tokens)
        assert asked is not None
        logits = model(batch.tokens.to(device), depth=depth).cpu()
        counts.append(count_right(logits, batch.targets, asked, data.levels))
    right, asked = torch.stack(counts).sum(0)
    return [round(share, 4) for share in (right / asked.clamp_min(1)).tolist()]
