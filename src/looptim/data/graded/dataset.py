"""Tasks of known difficulty as a dataset: a problem a window, a target wherever an answer is defined."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np
import torch

from ...model import IGNORE
from ..cache import digest
from ..corpus import SPLITS, Split
from ..dataset import Dataset
from ..tokenizer import Tokenizer
from .task import GradedTask

if TYPE_CHECKING:
    from jaxtyping import Int


@final
class GradedDataset(Dataset):
    """Problems drawn on the fly, each at the beginning of a window that the end token fills up without loss."""

    def __init__(self, task: GradedTask, *, seq_len: int, vocab_size: int = 257):
        length = task.length // 2 if task.pairs else task.length
        if length > seq_len:
            raise ValueError(
                f"a problem of synthetic:{task.name} takes {length} tokens but a window holds {seq_len}; raise "
                "train.seq_len or lower a knob in data.options"
            )
        self.graded, self.knobs, self.levels, self.unit = task, task.knobs, task.levels, task.unit
        self.seq_len, self.tokenizer, self.vocab_size = seq_len, Tokenizer.bytes(), vocab_size
        examples = [task.problem(split, 0, index) for split in SPLITS for index in range(16)]
        self.fingerprint = {
            "source": f"synthetic:{task.name}",
            "options": {name: value for name, value in task.knobs.items() if value is not False},
            "content": digest(examples),
            "tokenizer": self.tokenizer.hash,
        }

    def num_tokens(self, split: Split) -> None:
        """None: a task never ends."""

    def num_windows(self, split: Split) -> None:
        """None: a task never ends."""

    def windows(self, split: Split, seed: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = len(samples), self.seq_len
        tokens, targets = np.full(shape, self.tokenizer.eos, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        # What fills a window up is a document of its own.
        documents = np.full(shape, -1, dtype=np.int64)
        for row, sample in enumerate(samples):
            text, answers = self.graded.problem(split, seed, int(sample))
            read, wanted = (
                np.frombuffer(each.encode("latin-1"), np.uint8).astype(np.int64) for each in (text, answers)
            )
            levels = np.array(self.graded.difficulty_of(text))
            if self.graded.pairs:
                read, levels = read[::2] * self.vocab_size + read[1::2], levels[1::2]
            tokens[row, : len(read)] = read
            targets[row, : len(read)][levels >= 0] = wanted
            documents[row, : len(read)] = 0
        return tokens, targets, documents

    def difficulty_of(self, tokens: Int[torch.Tensor, "rows length"]) -> Int[torch.Tensor, "rows length"]:
        found = torch.full_like(tokens, -1)
        for row, line in zip(found, tokens.tolist(), strict=True):
            read = [token for token in line if token != self.tokenizer.eos]
            if self.graded.pairs:
                read = [part for pair in read for part in divmod(pair, self.vocab_size)]
            levels = torch.tensor(self.graded.difficulty_of("".join(map(chr, read))))
            levels = levels[1::2] if self.graded.pairs else levels
            row[: len(levels)] = levels
        return found
