"""How fast a run decodes with exits, against full depth, and where the time goes.

    looptim evaluate RUN --exits
    python benchmarks/exits.py RUN

The first command chooses a threshold of the local objective on held-out windows (at most 1% more loss, at 95%). The
second measures on a machine that has nothing else to do; policies take turns. Then tokens are decoded one at a time at
every forced depth: the line through these times says what a token costs however deep it goes, and what a loop costs.
"""

from __future__ import annotations

import argparse
import math
import statistics

import numpy as np
import torch
from torch import Tensor

from looptim.data import open_data
from looptim.evaluation.speed import decode, decoding_speed, flops_of
from looptim.loading import load, wrap
from looptim.loop.depth import Exit
from looptim.model import LoopedLM
from looptim.reporting.exits import chosen_table, read_exits, speed_table
from looptim.reporting.tables import markdown
from looptim.rundir import RunDir

NEW = 24


@torch.no_grad()
def milliseconds_by_loops(model: LoopedLM, prompt: Tensor) -> list[float]:
    """Of a token at batch 1, every token as deep as the other: medians of five rounds."""
    wrapped, steps = wrap(model), model.loops[0].steps
    seconds: list[list[float]] = [[] for _ in range(steps)]
    for _ in range(5):
        for loops in range(1, steps + 1):
            wrapped.set_depth(Exit("residual", math.inf, minimum=loops))
            seconds[loops - 1].append(decode(wrapped, prompt, NEW))
    return [1000 * statistics.median(each) / (NEW - 1) for each in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    given = parser.parse_args()
    [record] = read_exits([given.run])
    model, _ = load(given.run)
    config = RunDir(given.run).config()
    data = open_data(config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, progress=False)
    tokens = data.batch("valid", seed=0, step=0, batch_size=32).tokens
    depth = Exit("residual", record["signals"]["residual"]["chosen"]["threshold"])
    record["speed"] = decoding_speed(model, depth, tokens)
    print(markdown([chosen_table("residual", [record]), speed_table({"residual": [record]})]))
    times = milliseconds_by_loops(model, tokens[:1, :32])
    per_loop, fixed = np.polyfit(range(1, len(times) + 1), times, 1)
    deep = flops_of(config.model, float(len(times)))
    print("ms a token by loops:", " ".join(f"{each:.2f}" for each in times))
    share = 1 - (deep["full"] - flops_of(config.model, 1.0)["spent"]) / (len(times) - 1) * len(times) / deep["full"]
    print(
        f"fixed {fixed:.2f} ms, a loop {per_loop:.2f} ms: {fixed / times[-1]:.0%} of the time at full depth is fixed;"
    )
    print(f"of the FLOPs it is {share:.0%}")


if __name__ == "__main__":
    main()
