"""What signals say after every loop of tokens that need 0, 1, 2, ... hops, at full depth: medians over tokens.

    python benchmarks/waiting.py RUN...

For runs of chained assignments. A token that needs two hops has its answer after two or three loops; until its value
has come to it, it waits.
"""

from __future__ import annotations

import sys

import torch

from looptim.data import open_data
from looptim.evaluation.exits import Pair, listen
from looptim.loading import load
from looptim.loop.signals import find_signal
from looptim.model import IGNORE
from looptim.reporting.tables import Cell, Table, markdown
from looptim.rundir import RunDir

SIGNALS = ("residual", "change", "entropy")


def table_of(path: str) -> Table:
    model, _ = load(path)
    config = RunDir(path).config()
    data = open_data(config.data, vocab_size=config.model.vocab_size, seq_len=config.train.seq_len, progress=False)
    batch = data.batch("valid", seed=0, step=0, batch_size=64)
    hops = data.difficulty_of(batch.tokens)
    if hops is None:
        raise SystemExit(f"{path}: nobody knows how many hops the tokens of {config.data.source} need")
    heard = listen(model, [Pair(batch.tokens, batch.targets)], {name: find_signal(name) for name in SIGNALS})
    rows: list[list[str | Cell]] = []
    for name, [values] in heard.items():
        for number in hops.unique().tolist():
            these = (hops == number) & (batch.targets != IGNORE)
            medians = [torch.median(after[these]).item() for after in values]
            rows.append([name, f"{number} hops", *(Cell(each, form="{:.3f}") for each in medians)])
    header = ["signal", "needs", *(f"after loop {loop + 1}" for loop in range(len(rows[0]) - 2))]
    model_name = f"{config.model.loop.preset} {config.model.loop.options or ''}".strip()
    return Table("waiting", f"{model_name}, seed {config.train.seed}", header, rows, [], labels=2)


if __name__ == "__main__":
    print(markdown([table_of(path) for path in sys.argv[1:]]))
