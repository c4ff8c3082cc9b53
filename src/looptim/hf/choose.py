"""Choosing which layers of a pretrained decoder to loop."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from ..loop import trace
from .decoder import find_layers
from .loop_model import loop_model


@final
@dataclass(frozen=True)
class LayerChoice:
    """Measurements of the layers and of every window of `size` layers; prints as a recommendation."""

    size: int
    influence: list[float]
    """For each layer, `1 - cos(in, out)`: how much it turns the hidden states (Men et al., 2024)."""
    angle: list[float]
    """For each window, `arccos(cos(in, out)) / pi` (Gromov et al., 2024)."""
    contraction: list[float]
    """For each window `g`, `|g(g(h)) - g(h)| / |g(h) - h|`: how far a second pass moves relative to the first."""

    @property
    def best(self) -> int:
        """The first layer of the window that a second pass moves least."""
        return min(range(len(self.contraction)), key=self.contraction.__getitem__)

    def layout(self, loops: int = 2) -> str:
        """The layout that loops the best window."""
        return _layout(self.best, self.size, len(self.influence), loops)

    def __str__(self) -> str:
        first, last, windows = self.best, self.best + self.size - 1, len(self.contraction)
        return (
            f"Loop layers {first} to {last} ({self.layout()}): a second pass moves the state "
            f"{self.contraction[first]:.2f} times as far as the first, the least of {windows} windows (median "
            f"{statistics.median(self.contraction):.2f}), at an angular distance of {self.angle[first]:.2f}."
        )


@torch.no_grad()
def choose_layers(
    model: PreTrainedModel, texts: Sequence[str] | Sequence[Tensor], *, tokenizer: Any = None, size: int = 4
) -> LayerChoice:
    """Measure every window of `size` layers of a decoder on some texts, and recommend one to loop.

    `texts` are tensors of token ids, (1, T), or with a `tokenizer` of transformers strings. Medians are over tokens:
    in many models the first token's state is a hundred times as large as the others.
    """
    if not texts:
        raise ValueError("choose_layers measures on texts; give at least one")
    if tokenizer is None and any(isinstance(text, str) for text in texts):
        raise ValueError("texts are strings; give their tokenizer too, or token ids")
    encode: Any = tokenizer
    tokens = [encode(text, return_tensors="pt").input_ids if isinstance(text, str) else text for text in texts]
    body, name = find_layers(model)
    count = len(list(body.get_submodule(name).children()))
    if not 1 <= size <= count:
        raise ValueError(f"size must be from 1 to {count}, the number of layers, got {size}")
    states = [_states(model, each) for each in tokens]
    windows = range(count - size + 1)
    return LayerChoice(
        size=size,
        influence=[_median(states, lambda h, i=i: 1 - _cosine(h[i], h[i + 1])) for i in range(count)],
        angle=[_median(states, lambda h, i=i: _cosine(h[i], h[i + size]).arccos() / math.pi) for i in windows],
        contraction=[_contraction(model, _layout(i, size, count, 2), tokens) for i in windows],
    )


def _states(model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """The hidden states before the first layer and after each layer."""
    body, name = find_layers(model)
    seen: list[Tensor] = []

    def keep(module: Any, given: tuple[Tensor, ...], out: Tensor) -> None:
        seen.extend([out] if seen else [given[0], out])

    handles = [layer.register_forward_hook(keep) for layer in body.get_submodule(name).children()]
    try:
        model(tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a.float(), b.float(), dim=-1).clamp(-1, 1)


def _median(states: list[list[Tensor]], measure: Callable[[list[Tensor]], Tensor]) -> float:
    return torch.cat([measure(each).flatten() for each in states]).median().item()


def _contraction(model: PreTrainedModel, layout: str, tokens: Sequence[Tensor]) -> float:
    """The median over tokens of how far a second pass of a window moves a token, relative to the first pass."""
    looped = loop_model(model, layout, "vanilla")
    ratios = []
    for each in tokens:
        with trace(looped) as seen:
            looped(each, use_cache=False)
        first, second = ((t - o).float().norm(dim=-1) for o, t in zip(seen.read, seen.target, strict=True))
        ratios.append((second / first.clamp_min(1e-12)).flatten())
    return torch.cat(ratios).median().item()


def _layout(first: int, size: int, count: int, loops: int) -> str:
    parts = [str(first) if first else "", f"{size}x{loops}", str(count - first - size) if first + size < count else ""]
    return "-".join(filter(None, parts))
