"""What a run that learned chained assignments solves, by the hops that are needed and the loops that are run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..base.files import write_whole
from ..data import Dataset, open_data
from ..loading import load
from ..loop import Loop
from ..loop.depth import Fixed
from ..model import LoopedLM
from ..rundir import RunDir
from ..training.step import count_right

LOOPS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
"""Beside the number that a run was trained with, for a transition that its loops share."""
BATCH = 50


def evaluate_hops(path: str | Path, *, problems: int) -> dict[str, Any]:
    """The share of right answers on held-out problems, written to the run: by loops, then by hops."""
    run = RunDir(path)
    model, _ = load(path)
    config = run.config()
    data = open_data(config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, progress=False)
    trained = next((segment.loops for segment in config.model.segments if segment.loops is not None), None)
    found = {trained or 1: _shares(model, data, None, problems)}
    # All numbers of hops are equally frequent.
    share = sum(found[trained or 1]) / len(found[trained or 1])
    if trained is not None and all(loop.shared for loop in model.loops if isinstance(loop, Loop)):
        found |= {loops: _shares(model, data, loops, problems) for loops in LOOPS if loops != trained}
    record = {"problems": problems, "results": {"exact_match,none": share}, "loops": dict(sorted(found.items()))}
    write_whole(run.hops_file, json.dumps(record) + "\n")
    return record


@torch.no_grad()
def _shares(model: LoopedLM, data: Dataset, loops: int | None, problems: int) -> list[float]:
    depth = None if loops is None else Fixed(loops)
    counts = []
    for step in range(-(-problems // BATCH)):
        batch = data.batch("valid", seed=0, step=step, batch_size=BATCH)
        hops = data.needed_hops(batch.tokens)
        assert hops is not None
        counts.append(count_right(model(batch.tokens, depth=depth), batch.targets, hops))
    right, asked = torch.stack(counts).sum(0)
    return [round(share, 4) for share in (right / asked).tolist()]
