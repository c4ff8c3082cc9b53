"""Batches as pure functions of (seed, step), so that there is no state to save."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import numpy as np
import torch

from ..model import IGNORE, document_lengths, document_starts
from .corpus import SPLITS, Split
from .permutation import permute
from .tasks import Task
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxtyping import Int


class Batch(NamedTuple):
    """Rows of tokens, the token after each, and the document each belongs to."""

    tokens: Int[torch.Tensor, "rows length"]
    targets: Int[torch.Tensor, "rows length"]
    """A target of -100 has no loss."""
    documents: Int[torch.Tensor, "rows length"]
    """Ids that change where a new document begins; the token that ends a document belongs to it."""

    def to(self, device: torch.device) -> Batch:
        if device.type != "cuda":
            return Batch(*(part.to(device) for part in self))
        # From pinned memory a GPU copies asynchronously, so the host does not wait.
        return Batch(*(part.pin_memory().to(device, non_blocking=True) for part in self))

    def split(self, rows: int) -> list[Batch]:
        """The batch in pieces of this many rows; the last one may have fewer."""
        return [Batch(*parts) for parts in zip(*(part.split(rows) for part in self), strict=True)]

    def document_lengths(self) -> list[int]:
        """The number of tokens of each document within its row, which is what `count` takes as `documents`."""
        return document_lengths(document_starts(self.documents))


def text_of(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a fingerprint that distinguishes texts.

    It leaves out where the text lies, as well as entries that follow from the rest or were not always recorded.
    """
    return {key: value for key, value in fingerprint.items() if key not in ("source", "valid_bytes", "valid_hash")}


class Dataset(abc.ABC):
    """Windows of `seq_len` tokens with their targets, from a corpus or a task."""

    seq_len: int
    tokenizer: Tokenizer
    fingerprint: Mapping[str, Any]
    """What a run records about its data: source, hash of the content, hash of the tokenizer, counts."""
    task: Task | None = None
    """The synthetic task and its options, if the data is a task."""
    knobs: Mapping[str, Any] = {}
    levels: range = range(0)
    """The difficulties of its targets, where they are known."""
    unit: str = ""
    """What these count."""

    @abc.abstractmethod
    def num_tokens(self, split: Split) -> int | None:
        """The number of tokens in a split; None if they are drawn endlessly."""

    @abc.abstractmethod
    def num_windows(self, split: Split) -> int | None:
        """The number of windows in an epoch; None if they are drawn endlessly."""

    @abc.abstractmethod
    def windows(self, split: Split, seed: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, targets and documents at these positions of the split's endless order."""

    def difficulty_of(self, tokens: Int[torch.Tensor, "rows length"]) -> Int[torch.Tensor, "rows length"] | None:
        """How deep one must look for each target, -1 where there is none; None where that is not known."""
        return None

    def batch(self, split: Split, *, seed: int, step: int, batch_size: int, rows: slice | None = None) -> Batch:
        """Tokens, targets and documents of a step, each (rows, seq_len) int64.

        `batch_size` is the global batch, and `rows` selects the part of this process: rank r of w takes `slice(r * B //
        w, (r + 1) * B // w)`, so all processes together see what a single one would. In training every window comes
        once per epoch, in an order that depends on `seed` and epoch; validation ignores `seed`.
        """
        _check_split(split)
        if batch_size < 1 or step < 0:
            raise ValueError(f"step {step} and batch_size {batch_size} must be at least 0 and 1")
        windows = self.num_windows(split)
        if windows is not None and windows < batch_size:
            raise ValueError(
                f"the {split} split of {self.fingerprint['source']!r} has {windows} windows of {self.seq_len} tokens, "
                f"fewer than a batch of {batch_size}; {_more_windows(split)}"
            )
        samples = step * batch_size + np.arange(batch_size)[rows if rows is not None else slice(None)]
        return Batch(*map(torch.from_numpy, self.windows(split, seed if split == "train" else 0, samples)))


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} must be train or valid")


def _more_windows(split: Split) -> str:
    more = "use more text" if split == "train" else "raise data.valid_fraction, set data.valid_source"
    return f"{more}, or lower train.seq_len or train.batch_size"


class Stream(Protocol):
    """The tokens of documents, one after another."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`."""
        ...

    def document_ends(self, start: int, stop: int) -> np.ndarray | None:
        """Whether each of these tokens ends a document; None if the end token tells."""
        ...

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        """Whether each of these tokens has a loss as a target; None if all have."""
        ...


@final
class PackedDataset(Dataset):
    """Windows of packed documents; the last target of a window is the first token of the next."""

    def __init__(
        self,
        streams: Mapping[Split, Stream],
        *,
        seq_len: int,
        tokenizer: Tokenizer,
        fingerprint: Mapping[str, Any],
        mask_boundaries: bool,
    ):
        self.seq_len, self.tokenizer, self.fingerprint = seq_len, tokenizer, fingerprint
        self.mask_boundaries = mask_boundaries
        self._streams = streams

    def num_tokens(self, split: Split) -> int:
        _check_split(split)
        return len(self._streams[split])

    def num_windows(self, split: Split) -> int:
        return max(self.num_tokens(split) - 1, 0) // self.seq_len

    def windows(self, split: Split, seed: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        size = self.num_windows(split)
        # Validation repeats one epoch in a shuffled order, so that any first part of it is a fair sample.
        epochs = samples // size if split == "train" else np.zeros_like(samples)
        places = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = permute(samples[here] % size, size=size, seed=seed, epoch=int(epoch))
        stream, width = self._streams[split], self.seq_len
        packed = np.empty((len(samples), width + 1), dtype=np.int64)
        ends, counts = np.empty((2, len(samples), width), dtype=bool)
        for row, last, count, place in zip(packed, ends, counts, places * width, strict=True):
            row[:] = stream.read(place, place + width + 1)
            known = stream.document_ends(place, place + width)
            last[:] = row[:-1] == self.tokenizer.eos if known is None else known
            known = stream.counted(place + 1, place + width + 1)
            count[:] = True if known is None else known
        tokens, targets = packed[:, :-1].copy(), packed[:, 1:].copy()
        targets[~counts] = IGNORE
        if self.mask_boundaries:
            targets[ends] = IGNORE
        return tokens, targets, ends.cumsum(1) - ends
