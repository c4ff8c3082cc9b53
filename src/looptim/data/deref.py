"""Chained assignments: a task of which every token's right depth is known."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from typing import Any, final

import numpy as np

from ..base.choices import nearest
from ..model import IGNORE
from .cache import digest
from .corpus import SPLITS, Split
from .dataset import Dataset
from .tasks import split_of
from .tokenizer import Tokenizer

NAMES = string.ascii_letters + "".join(c for c in string.punctuation if c not in "<>")
"""Of statements, 82 of them; a problem uses each at most once."""
VALUES = string.digits
KNOBS = {"chains": (6, 2, 10), "hops": (6, 2, 41)}
"""Default, lowest and highest."""


@final
class DerefDataset(Dataset):
    """Statements `name reference`, two tokens each; a reference is a value or the name of an earlier statement.

    `chains` chains of `hops` statements each are merged in a random order that keeps each chain's own. The first
    statement of a chain refers to a value, one per chain, every later one to the chain's statement before, by name;
    there are as many names as statements, given at random. The target at every reference is its chain's value, so a
    token needs d = 0 to `hops` - 1 hops, all equally frequent: `hops_of` says how many. R loops can follow R hops one
    after another, or 2^R - 1 by pointer doubling.

    What shortcuts score with 6 chains of 10, by hops 1, 2, 3, 4, 5 and 6 to 9: a guess among the values seen so far
    .24 .19 .18 .17 .17 .17, the latest value .39 .23 .19 .17 .17 .17; whoever solves J hops at most .30 at J + 1.
    `shortcut_scores` measures the first two at any knobs.

    A problem is told by the order in which its chains take turns, whatever names and values they have; the hash of that
    order alone puts it in the training or in the held-out split, which are therefore disjoint for every seed.
    """

    def __init__(self, options: Mapping[str, Any], *, seq_len: int):
        for name, value in options.items():
            if name not in KNOBS:
                raise ValueError(f"task 'deref' has no knob {name!r}{nearest(name, KNOBS)} known: {', '.join(KNOBS)}")
            _, low, high = KNOBS[name]
            if type(value) is not int or not low <= value <= high:
                raise ValueError(
                    f"knob {name!r} of task 'deref' must be a whole number from {low} to {high}, got {value!r}"
                )
        self.knobs = {name: options.get(name, default) for name, (default, _, _) in KNOBS.items()}
        self.chains, self.hops = self.knobs["chains"], self.knobs["hops"]
        statements = self.chains * self.hops
        if statements > len(NAMES):
            raise ValueError(
                f"task 'deref' has {len(NAMES)} names, but chains * hops is {statements}; lower one of them"
            )
        if 2 * statements > seq_len:
            raise ValueError(
                f"a problem of synthetic:deref takes {2 * statements} tokens but a window holds {seq_len}; raise "
                "train.seq_len or lower a knob in data.options"
            )
        self.seq_len, self.tokenizer = seq_len, Tokenizer.bytes()
        examples = [self.problem(split, 0, index) for split in SPLITS for index in range(16)]
        self.fingerprint = {
            "source": "synthetic:deref",
            "options": self.knobs,
            "content": digest(examples),
            "tokenizer": self.tokenizer.hash,
        }

    def num_tokens(self, split: Split) -> None:
        """None: a task never ends."""

    def num_windows(self, split: Split) -> None:
        """None: a task never ends."""

    def problem(self, split: Split, seed: int, index: int) -> tuple[str, str]:
        """The text of problem `index` of a split, and the value of each of its statements."""
        rng = random.Random(f"deref:{split}:{seed}:{index}")
        turns = [chain for chain in range(self.chains) for _ in range(self.hops)]
        while True:
            rng.shuffle(turns)
            order: dict[int, str] = {}
            canonical = " ".join(order.setdefault(chain, str(len(order))) for chain in turns)
            if split_of(f"{self.hops}:{canonical}") == split:
                break
        names, values = rng.sample(NAMES[: len(turns)], len(turns)), rng.sample(VALUES, self.chains)
        latest = list(values)
        text = []
        for name, chain in zip(names, turns, strict=True):
            text += [name, latest[chain]]
            latest[chain] = name
        return "".join(text), "".join(values[chain] for chain in turns)

    def windows(self, split: Split, seed: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = len(samples), self.seq_len
        tokens, targets = np.full(shape, self.tokenizer.eos, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        # What fills a window up is a document of its own.
        documents = np.full(shape, -1, dtype=np.int64)
        for row, sample in enumerate(samples):
            text, answers = self.problem(split, seed, int(sample))
            tokens[row, : len(text)] = np.frombuffer(text.encode(), dtype=np.uint8)
            targets[row, 1 : len(text) : 2] = np.frombuffer(answers.encode(), dtype=np.uint8)
            documents[row, : len(text)] = 0
        return tokens, targets, documents


def hops_of(text: str) -> list[int]:
    """How many hops each statement of a problem needs.

    >>> hops_of("a0b1cadc")
    [0, 0, 1, 2]
    """
    hops: dict[str, int] = {}
    for name, reference in zip(text[::2], text[1::2], strict=True):
        hops[name] = 0 if reference in VALUES else hops[reference] + 1
    return list(hops.values())


def shortcut_scores(data: DerefDataset, problems: int = 500) -> dict[str, list[float]]:
    """What it scores, by hops, to guess among the values seen so far, and to say the latest one.

    >>> scores = shortcut_scores(DerefDataset({"chains": 6, "hops": 10}, seq_len=120))
    >>> [round(score, 1) for score in scores["latest value"][:3]]
    [1.0, 0.4, 0.2]
    """
    sums = np.zeros((2, data.hops))
    for index in range(problems):
        text, answers = data.problem("valid", 0, index)
        seen: list[str] = []
        for depth, reference, answer in zip(hops_of(text), text[1::2], answers, strict=True):
            seen += [reference] if reference in VALUES else []
            sums[:, depth] += 1 / len(seen), answer == seen[-1]
    guess, latest = (sums / (problems * data.chains)).tolist()
    return {"guess among the values seen": guess, "latest value": latest}
