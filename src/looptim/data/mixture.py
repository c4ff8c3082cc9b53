"""Several sources in given proportions, window by window, as a pure function of (seed, step)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import numpy as np

from ..config import DataConfig
from .corpus import SPLITS, Split
from .dataset import Dataset, text_of
from .permutation import permute

CYCLE = 1 << 12
"""Every this many windows, each source has exactly its share, rounded to a window."""


def check_mixture(config: DataConfig) -> None:
    """Check that a mixture has sources, weights and a tokenizer."""
    if (config.source == "mixture") != bool(config.mixture):
        raise ValueError(
            f"data.source {config.source!r} and data.mixture {config.mixture} do not go together: a mixture is "
            'source = "mixture" and a table of sources with weights, as in mixture = {"web/*.bin" = 0.9, stdlib = 0.1}'
        )
    for name, weight in config.mixture.items():
        if name == "mixture" or not 0 < weight < math.inf:
            raise ValueError(f"data.mixture: {name!r} must be another source, with a weight above 0, got {weight}")
    if config.tokenizer == "bpe":
        raise ValueError(
            "a mixture needs an existing tokenizer; set data.tokenizer to bytes, a tokenizer.json or hf:NAME"
        )


def quotas(weights: Mapping[str, float]) -> list[int]:
    """How many of `CYCLE` windows each source has: its share, the largest remainders rounded up.

    >>> quotas({"web": 3.0, "code": 1.0})
    [3072, 1024]
    """
    shares = np.array(list(weights.values()), dtype=np.float64)
    exact = shares / shares.sum() * CYCLE
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: CYCLE - whole.sum()]] += 1
    return whole.tolist()


@final
class MixedDataset(Dataset):
    """Windows of several datasets. Of every `CYCLE` windows each has its share, in an order that depends on the seed.

    A source goes through all of its windows before any of them comes again, whatever the epochs of the others.
    """

    def __init__(self, parts: Mapping[str, Dataset], weights: Mapping[str, float]):
        self.parts, self.quotas = list(parts.values()), quotas(weights)
        self.seq_len, self.tokenizer = self.parts[0].seq_len, self.parts[0].tokenizer
        for (name, part), quota in zip(parts.items(), self.quotas, strict=True):
            if not quota:
                raise ValueError(f"data.mixture gives {name!r} less than one of {CYCLE:,} windows; raise its weight")
            for split in SPLITS:
                if part.num_windows(split) == 0:
                    raise ValueError(
                        f"the {split} split of {name!r}, of data.mixture, has no window of {self.seq_len} tokens; use "
                        "more of it, raise data.valid_fraction, or lower train.seq_len"
                    )
        self.fingerprint = {
            "source": f"mixture of {', '.join(parts)}",
            "mixture": [[quota, text_of(p.fingerprint)] for p, quota in zip(self.parts, self.quotas, strict=True)],
            "tokenizer": self.tokenizer.hash,
        }

    def num_tokens(self, split: Split) -> int | None:
        counts = [part.num_tokens(split) for part in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def num_windows(self, split: Split) -> None:
        """None, because sources have epochs of different lengths."""

    def windows(self, split: Split, seed: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        cycles, places = np.divmod(samples, CYCLE)
        owners, inner = np.empty_like(samples), np.empty_like(samples)
        for cycle in np.unique(cycles):
            here = cycles == cycle
            of_cycle, before = self._order(seed, int(cycle))
            owners[here] = of_cycle[places[here]]
            inner[here] = before[places[here]]
        made = np.empty((3, len(samples), self.seq_len), dtype=np.int64)
        for number, part in enumerate(self.parts):
            here = owners == number
            if here.any():
                made[:, here] = part.windows(split, seed, inner[here])
        tokens, targets, documents = made
        return tokens, targets, documents

    def _order(self, seed: int, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each window of a cycle, and how many earlier windows of that source there were."""
        places = permute(np.arange(CYCLE), size=CYCLE, seed=seed, epoch=cycle)
        owners = np.searchsorted(np.cumsum(self.quotas), places, side="right")
        before = np.empty_like(owners)
        for number, quota in enumerate(self.quotas):
            before[owners == number] = cycle * quota + np.arange(quota)
        return owners, before
