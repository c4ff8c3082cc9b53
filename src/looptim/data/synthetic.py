"""Synthetic tasks as a dataset: whole examples side by side in a window, with a loss on the answers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, final

import numpy as np

from ..model import IGNORE
from .cache import digest
from .corpus import SPLITS, Split
from .dataset import Dataset
from .tasks import STOP, Task
from .tokenizer import Tokenizer

_MOST = 1 << 20
"""An upper bound on examples per window; window n draws examples from n * _MOST on."""


def knobs_of(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """The task's options among those of a source, with defaults."""
    return task.settings({key: value for key, value in options.items() if key != "loss_on_prompt"})


@final
class SyntheticDataset(Dataset):
    """Examples drawn on the fly. A window begins with one, holds only whole ones, and is padded without loss."""

    def __init__(
        self, task: Task, options: Mapping[str, Any], *, seq_len: int, tokenizer: Tokenizer, mask_boundaries: bool
    ):
        self.seq_len, self.tokenizer, self.task = seq_len, tokenizer, task
        self.loss_on_prompt = options.get("loss_on_prompt", False)
        if not isinstance(self.loss_on_prompt, bool):
            raise ValueError(f"data.options.loss_on_prompt must be true or false, got {self.loss_on_prompt!r}")
        self.knobs = knobs_of(task, options)
        self.mask_boundaries = mask_boundaries
        examples = [task.example(split, 0, index, **self.knobs) for split in SPLITS for index in range(16)]
        self.fingerprint = {
            "source": f"synthetic:{task.name}",
            "options": {**self.knobs, "loss_on_prompt": self.loss_on_prompt},
            "content": digest(examples),
            "tokenizer": tokenizer.hash,
        }
        self._fill("train", 0, 0)

    def num_tokens(self, split: Split) -> None:
        """None: a task never ends."""

    def num_windows(self, split: Split) -> None:
        """None: a task never ends."""

    def windows(self, split: Split, seed: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        packed = np.full((len(samples), self.seq_len + 1), self.tokenizer.eos, dtype=np.int64)
        counts = np.zeros(packed.shape, dtype=bool)
        # The padding that fills up a window is a document of its own.
        documents = np.full(packed.shape, -1, dtype=np.int64)
        for row, sample in enumerate(samples):
            tokens, loss, examples = self._fill(split, seed, int(sample))
            packed[row, : len(tokens)] = tokens
            counts[row, : len(loss)] = loss
            documents[row, : len(examples)] = examples
        return packed[:, :-1].copy(), np.where(counts, packed, IGNORE)[:, 1:].copy(), documents[:, :-1].copy()

    def _fill(self, split: Split, seed: int, sample: int) -> tuple[list[int], list[bool], list[int]]:
        """The tokens of a window, whether each counts as a target, and the example each belongs to."""
        assert self.task is not None
        tokens: list[int] = []
        loss: list[bool] = []
        examples: list[int] = []
        for index in itertools.count(sample * _MOST):
            example = self.task.example(split, seed, index, **self.knobs)
            prompt, answer = self.tokenizer.encode(example.prompt), self.tokenizer.encode(example.answer + STOP)
            size = len(prompt) + len(answer)
            if not tokens and size > self.seq_len + 1:
                raise ValueError(
                    f"one example of {self.fingerprint['source']!r} takes {size} tokens but a window holds "
                    f"{self.seq_len + 1}; raise train.seq_len or lower a knob in data.options"
                )
            if len(tokens) + size > self.seq_len + 1:
                break
            tokens += prompt + answer
            on_prompt = [self.loss_on_prompt] * len(prompt)
            on_prompt[0] &= not self.mask_boundaries
            loss += on_prompt + [True] * len(answer)
            examples += [index - sample * _MOST] * size
        return tokens, loss, examples
