"""Where an unrolled layer attends under transformers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sliding_window_overlay
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..loop.depth import Depth, Exit
from ..model import AttentionKind, cached_attention
from .config import LoopedConfig

if TYPE_CHECKING:
    from jaxtyping import Float, Int


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


class Unmasked(NamedTuple):
    """What stands for a mask where the order of the tokens and a window say all about who sees whom."""

    window: int | None


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

    @property
    def sliding_window(self) -> int | None:
        """The keys a query sees. The one window that transformers knows is read from the config, as its masks do."""
        return window_of(self.kind, self.config)

    def forward(
        self,
        query: Float[Tensor, "B H T D"],
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T D"],
        *,
        attention_mask: Any,
        past_key_values: Cache | None,
        weights: list[Tensor] | None = None,
        rows: Int[Tensor, " R"] | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "B H T D"]:
        """Attend to the cached keys and these; `weights`, if given, receives the attention weights.

        Without a query, which is a visit that all tokens skip, these keys and values are cached and that is all. With
        `rows` the queries are those of these sequences alone, and all keys and values are cached.
        """
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        if not query.shape[2]:
            return query
        if rows is not None:
            key, value = key[rows], value[rows]
            attention_mask = _of_rows(attention_mask, rows)
            kwargs = {name: _of_rows(given, rows) for name, given in kwargs.items()}
        if isinstance(attention_mask, Unmasked):
            return cached_attention(query, key, value, window=attention_mask.window)
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
        # Attention of transformers returns (batch, length, heads, dim), that of vLLM (tokens, heads * dim).
        batch, _, length, dim = query.shape
        return y.reshape(batch, length, -1, dim).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{self.layer_idx}, {self.kind.name}"


def _of_rows(given: Any, rows: Tensor) -> Any:
    """A mask or positions of some sequences, where each sequence has its own."""
    if isinstance(given, BlockMask):
        raise ValueError("mode='compact' gathers sequences, which flex attention does not; choose sdpa, or mode='end'")
    own = isinstance(given, Tensor) and given.dim() > 1 and len(given) > 1
    return given[rows] if own else given


def window_of(kind: AttentionKind, config: LoopedConfig) -> int | None:
    """The keys a query sees."""
    return config.sliding_window if kind.name == "sliding_attention" else kind.window


def make_masks(
    config: LoopedConfig,
    kinds: Iterable[AttentionKind],
    inputs_embeds: Tensor,
    attention_mask: Any,
    position_ids: Tensor | None,
    past_key_values: Cache | None,
) -> Mapping[str, Any]:
    """The mask of each kind of layer. `generate` and continuous batching come with masks already made."""
    if isinstance(attention_mask, Mapping):
        return attention_mask
    return {
        kind.name: _mask_of(kind)(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        for kind in kinds
    }


def needs_no_mask(
    config: LoopedConfig, attention_mask: Any, position_ids: Tensor | None, past_key_values: Cache | None
) -> bool:
    """Whether the order of the tokens and the windows say all about who sees whom: then no mask has to be filled."""
    if config._attn_implementation != "sdpa" or torch.compiler.is_compiling():
        return False
    # A cache of a fixed size has keys behind the last token.
    if past_key_values is not None and past_key_values.is_compileable:
        return False
    if attention_mask is None:
        # Without mask and cache, positions may tell of several sequences in a row.
        return position_ids is None or past_key_values is not None
    return isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and bool(attention_mask.all())


def _mask_of(kind: AttentionKind) -> Callable[..., Any]:
    """What makes the mask of a kind of layer."""
    if kind.name == "sliding_attention":
        return create_sliding_window_causal_mask
    if kind.window is None:
        return create_causal_mask
    # The caches of transformers know one window; a layer with another is cached whole.
    return functools.partial(create_causal_mask, and_mask_function=sliding_window_overlay(kind.window))


def depth_of_call(depth: Depth | None, length: int, past_key_values: Cache | None, *, packed: bool) -> Depth | None:
    """The depth of a call with `length` new tokens; `packed` are those of several sequences in one row."""
    if depth is None or not depth.leaves:
        return depth
    if packed:
        if depth.by_place:
            raise ValueError("continuous batching has no places of tokens; give an Exit without prompt, not PerToken")
        # The cache is written where attention is called, so that every visit has to be made.
        return dataclasses.replace(depth, mode="mask") if isinstance(depth, Exit) else depth
    if not depth.by_place:
        return depth
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    return depth.part(int(past), length)


def make_positions(inputs_embeds: Tensor, attention_mask: Any, past_key_values: Cache | None) -> Int[Tensor, "*B T"]:
    """Where the new tokens stand: padding on the left does not count."""
    length = inputs_embeds.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    if isinstance(past, int):
        return torch.arange(past, past + length, device=inputs_embeds.device).unsqueeze(0)
    return (torch.arange(length, device=inputs_embeds.device) + past).unsqueeze(0)
