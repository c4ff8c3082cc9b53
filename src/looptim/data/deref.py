"""Chained assignments: a task in which the right depth of every token is known."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ..base.choices import nearest
from ..model import IGNORE
from .cache import digest
from .corpus import SPLITS, Split
from .dataset import Dataset
from .tasks import split_of
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxtyping import Int

NAMES = string.ascii_letters + "".join(c for c in string.punctuation if c not in "<>")
"""The 82 names of statements; a problem uses each at most once."""
VALUES = string.digits
KNOBS = {"chains": (6, 2, 10), "hops": (6, 2, 41)}
"""Default, minimum and maximum of each option."""
FOLDS = 10
"""Number of folds; each holds out a tenth of the problems."""


@final
class DerefDataset(Dataset):
    """Statements `name reference`; a reference is a value or the name of an earlier statement.

    A statement is two tokens (form B), or with `pairs` (form A) one position that reads both: the number
    `name * vocab_size + reference`, for a model with `model.pairs`. The problems are the same.

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

    def __init__(self, options: Mapping[str, Any], *, seq_len: int, vocab_size: int = 257, fold: int = 0):
        self.pairs = options.get("pairs", False)
        if not isinstance(self.pairs, bool):
            raise ValueError(f"knob 'pairs' of task 'deref' must be true or false, got {self.pairs!r}")
        options = {name: value for name, value in options.items() if name != "pairs"}
        if fold >= FOLDS:
            raise ValueError(f"data.valid_fold of task 'deref' is from 0 to {FOLDS - 1}, got {fold}")
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
        length = statements if self.pairs else 2 * statements
        if length > seq_len:
            raise ValueError(
                f"a problem of synthetic:deref takes {length} tokens but a window holds {seq_len}; raise "
                "train.seq_len or lower a knob in data.options"
            )
        self.seq_len, self.tokenizer, self.vocab_size, self.fold = seq_len, Tokenizer.bytes(), vocab_size, fold
        # A statement has an answer only once it is complete.
        self._answered = slice(None) if self.pairs else slice(1, None, 2)
        examples = [self.problem(split, 0, index) for split in SPLITS for index in range(16)]
        self.fingerprint = {
            "source": "synthetic:deref",
            "options": {**self.knobs, **({"pairs": True} if self.pairs else {})},
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
            if split_of(f"{self.hops}:{canonical}", self.fold) == split:
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
        # What fills up a window is a document of its own.
        documents = np.full(shape, -1, dtype=np.int64)
        for row, sample in enumerate(samples):
            text, answers = self.problem(split, seed, int(sample))
            read, wanted = (np.frombuffer(each.encode(), dtype=np.uint8).astype(np.int64) for each in (text, answers))
            if self.pairs:
                read = read[::2] * self.vocab_size + read[1::2]
            tokens[row, : len(read)] = read
            targets[row, self._answered][: len(wanted)] = wanted
            documents[row, : len(read)] = 0
        return tokens, targets, documents

    def needed_hops(self, tokens: Int[torch.Tensor, "rows length"]) -> Int[torch.Tensor, "rows length"]:
        found = torch.full_like(tokens, -1)
        for row, line in zip(found, tokens.tolist(), strict=True):
            read = [token for token in line if token != self.tokenizer.eos]
            if self.pairs:
                read = [part for pair in read for part in divmod(pair, self.vocab_size)]
            hops = torch.tensor(hops_of("".join(map(chr, read))))
            row[self._answered][: len(hops)] = hops
        return found


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
    """The scores, by hops, of guessing among the values seen so far and of repeating the latest one.

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
