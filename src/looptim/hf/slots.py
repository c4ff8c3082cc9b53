"""Where an unrolled layer attends under transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model import AttentionKind
from .config import LoopedConfig

if TYPE_CHECKING:
    from jaxtyping import Float


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`softmax(q k^T scaling + mask) v`, its softmax in fp32, and the weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores if attention_mask is None else scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class AttentionSlot(nn.Module):
    """Where one unrolled layer attends: no weights, but a place of its own in the KV cache, `layer_idx`."""

    is_causal = True

    def __init__(self, config: LoopedConfig, layer_idx: int, kind: AttentionKind):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.kind = kind
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.sliding_window = kind.window

    def forward(
        self,
        query: Float[Tensor, "B H T D"],
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T D"],
        *,
        attention_mask: Any,
        past_key_values: Cache | None,
        weights: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "B H T D"]:
        """Attend to the cached keys and these; `weights`, if given, receives the attention weights."""
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation or "eager"
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        y, seen = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=0.0,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        if weights is not None:
            weights.append(seen)
        return y.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{self.layer_idx}, {self.kind.name}"
