"""A block for a single token on a CPU: what `Block.forward` computes, in as few calls as there can be.

While one text is written, a call of torch takes longer than most of its work. So products are of a matrix and a vector,
residuals are added by the product before them, and queries, keys and values, or gate and up, are one product where
their matrices lie behind each other in memory. Nothing is kept: `lay_together` only moves weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.numerics import autocast_dtype, few_without_grad, is_plain, unit_rms_of_few
from .attention import Attend, Attention
from .block import EAGER, Block
from .moe import Experts, MoE, Router, SwiGLU, row_of
from .norm import RMSNorm

if TYPE_CHECKING:
    from jaxtyping import Float

KNOWN = frozenset({Block, Attention, RMSNorm, nn.Linear, SwiGLU, MoE, Router, Experts})
"""The classes of the parts that are run here without being called."""

ALIGNMENT = 64
"""Bytes. Torch allocates in multiples of them, and what a kernel computes may depend on them in its last bits."""


def is_alone(h: Float[Tensor, "B T d"]) -> bool:
    """Whether this is a single token, of which nobody asks a gradient."""
    if h.shape[:2] != (1, 1) or not few_without_grad(h) or h.dtype not in (torch.float32, torch.float64):
        return False
    return autocast_dtype(h) == h.dtype


def knows(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module and its parts compute what their classes say, with plain weights of this dtype."""
    # This is asked for every token; attributes of a module cost a search each.
    own = module.__dict__
    if type(module) not in KNOWN or own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
        return False
    if own.get("_compiled_call_impl") is not None or own.get("exchange") is not None:
        return False
    if own.get("halves", EAGER) != EAGER:
        return False
    for weight in own["_parameters"].values():
        if weight is not None and (type(weight) is not nn.Parameter or weight.dtype != dtype):
            return False
    return all(part is None or knows(part, dtype) for part in own["_modules"].values())


def run_block(
    block: Block, x: Float[Tensor, "1 1 d"], attend: Attend, turn: Float[Tensor, "D D"], visit: int
) -> Float[Tensor, "1 1 d"]:
    """The output of a block that `knows`, for a rotation given as the matrix `turn`."""
    y = x.view(-1)
    attention: Any = block.attention
    sizes = [part.weight.shape[0] // attention.head_dim for part in (attention.q, attention.k)]
    z = rows_of(attention.q, attention.k, attention.v, h=_normed(y, block.attention_norm))
    both, v = z.view(-1, attention.head_dim).split([sum(sizes), sizes[1]])
    if attention.q_norm is not None:
        both = unit_rms_of_few(both, attention.q_norm.eps)
        for part, norm in zip(both.split(sizes), (attention.q_norm, attention.k_norm), strict=True):
            part.addcmul_(part, norm.gain)
    q, k = (both @ turn).view(1, -1, 1, attention.head_dim).split(sizes, dim=1)
    seen = attend(q, k, v.view(1, sizes[1], 1, -1))
    y = torch.addmv(y, attention.o.weight, seen.reshape(-1))
    run = _run_experts if isinstance(block.feedforward, MoE) else _run_swiglu
    return run(block.feedforward, y, _normed(y, block.feedforward_norm), visit).view(x.shape)


def _normed(y: Float[Tensor, " d"], norm: RMSNorm) -> Float[Tensor, " d"]:
    scale = 1 / math.sqrt(torch.dot(y, y).item() / len(y) + norm.eps)
    return torch.addcmul(y, y, norm.gain).mul_(scale)


def _run_swiglu(part: Any, y: Float[Tensor, " d"], h: Float[Tensor, " d"], visit: int) -> Float[Tensor, " d"]:
    gate, up = rows_of(part.gate, part.up, h=h).chunk(2)
    return torch.addmv(y, part.down.weight, F.silu(gate).mul_(up))


def _run_experts(moe: Any, y: Float[Tensor, " d"], h: Float[Tensor, " d"], visit: int) -> Float[Tensor, " d"]:
    router, experts, shared = moe.router, moe.experts, moe.shared
    scores = (router.weight if router.weight.dim() == 2 else row_of(router.weight, visit)).mv(h).sigmoid_()
    chosen = (scores + row_of(moe.bias, visit)).topk(router.top_k, sorted=False)[1].tolist()
    values = scores.tolist()
    # The floor is that of the router.
    share = router.scaling / max(sum(values[expert] for expert in chosen), 1e-20)
    gate, up = rows_of(shared.gate, shared.up, h=h).chunk(2)
    gates = torch.cat([*(experts.gate[expert].mv(h) for expert in chosen), gate])
    ups = torch.cat([*(experts.up[expert].mv(h) for expert in chosen), up])
    *hidden, last = F.silu(gates).mul_(ups).split([*[experts.gate.shape[1]] * len(chosen), len(gate)])
    y = torch.addmv(y, shared.down.weight, last)
    for expert, part in zip(chosen, hidden, strict=True):
        y.addmv_(experts.down[expert], part, alpha=share * values[expert])
    return y


def rows_of(*parts: nn.Linear, h: Float[Tensor, " d"]) -> Float[Tensor, " n"]:
    """The products of all matrices with `h`, one behind the other."""
    whole = joined(*(part.weight for part in parts))
    return torch.cat([part.weight.mv(h) for part in parts]) if whole is None else whole.mv(h)


def joined(*weights: Float[Tensor, "_ d"]) -> Float[Tensor, "n d"] | None:
    """One matrix of the rows of all, if they lie behind each other in memory; nothing is copied.

    >>> a, b = torch.arange(6.0).view(3, 2).split([1, 2])
    >>> joined(a, b).shape, joined(b, a)
    (torch.Size([3, 2]), None)
    """
    first, at, rows = weights[0], weights[0].data_ptr(), 0
    for weight in weights:
        if weight.data_ptr() != at or not weight.is_contiguous():
            return None
        at += weight.numel() * weight.element_size()
        rows += weight.shape[0]
    try:
        return first.as_strided((rows, first.shape[1]), first.stride())
    except RuntimeError:
        # The neighbor belongs to somebody else.
        return None


def lay_together(model: nn.Module) -> None:
    """Move weights that a single token multiplies together behind each other in memory; their values stay.

    >>> layer = SwiGLU(16, 32)
    >>> lay_together(layer)
    >>> joined(layer.gate.weight, layer.up.weight).shape
    torch.Size([64, 16])
    """
    for module in model.modules():
        names = {Attention: ("q", "k", "v"), SwiGLU: ("gate", "up")}.get(type(module), ())
        parts = [part for part in (getattr(module, name) for name in names) if type(part) is nn.Linear]
        weights: list[Any] = [part.weight for part in parts]
        if names and len(weights) == len(names) and all(map(_may_move, weights)) and joined(*weights) is None:
            # A weight that came from inference mode could never be trained again.
            with torch.inference_mode(False), torch.no_grad():
                whole = torch.cat(weights)
                for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
                    weight.data = part


def _may_move(weight: nn.Parameter) -> bool:
    plain = type(weight) is nn.Parameter and is_plain(weight.data) and weight.device.type == "cpu"
    return plain and not weight.is_shared() and weight.numel() * weight.element_size() % ALIGNMENT == 0
