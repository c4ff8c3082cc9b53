"""The language-model head in fp32, and a loss that never holds the logits of a whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.numerics import full_precision

if TYPE_CHECKING:
    from jaxtyping import Float, Int

IGNORE = -100
"""Targets with this value are ignored."""


class Head(nn.Linear):
    """`logits = W h` in fp32 (or float64), or their mean cross entropy if targets are given.

    >>> head, h, targets = Head(4, vocab_size=8), torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    >>> head(h).shape, round(head(h, targets).item(), 4)
    (torch.Size([2, 3, 8]), 2.0794)
    """

    def __init__(self, width: int, *, vocab_size: int, chunk: int = 1024):
        super().__init__(width, vocab_size, bias=False)
        self.chunk = chunk

    def forward(
        self, h: Float[Tensor, "B T d"], targets: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T vocab"] | Float[Tensor, ""]:
        dtype = torch.promote_types(h.dtype, torch.float32)
        if targets is None:
            with full_precision(h):
                return F.linear(h.to(dtype), self.weight.to(dtype))
        with full_precision(h):
            total = LinearCrossEntropy.apply(
                h.flatten(0, -2), self.weight, targets.flatten(), self.chunk, torch.is_grad_enabled()
            )
        assert isinstance(total, Tensor)
        return total / (targets != IGNORE).sum().clamp_min(1)


class LinearCrossEntropy(torch.autograd.Function):
    """The summed cross entropy of `W h`; gradients are computed in the forward pass, one chunk of tokens at a time.

    For logits `s = W h` and target `y`: `L = logsumexp(s) - s_y`, `dL/ds = softmax(s) - onehot(y)`. The logits of a
    chunk are turned into that derivative in place and used at once for `dL/dh` and `dL/dW`: three matmuls in all, as
    the plain form has, and at most `chunk` rows of logits alive.
    """

    @staticmethod
    def forward(ctx, h: Tensor, weight: Tensor, targets: Tensor, chunk: int, grads: bool) -> Tensor:
        dtype = torch.promote_types(h.dtype, torch.float32)
        W = weight.to(dtype)
        # `needs_input_grad` says what could have a gradient, even while gradients are switched off.
        wants_h, wants_W = (grads and needed for needed in ctx.needs_input_grad[:2])
        grad_h = torch.empty_like(h) if wants_h else None
        grad_W = torch.zeros_like(W) if wants_W else None
        total = h.new_zeros((), dtype=dtype)
        for start in range(0, h.shape[0], chunk):
            part = slice(start, start + chunk)
            x, y = h[part].to(dtype), targets[part]
            counts = (y != IGNORE).unsqueeze(-1)
            # Only ignored targets become token 0; any other invalid target must fail in gather.
            y = y.masked_fill(y == IGNORE, 0).unsqueeze(-1)
            s = x @ W.T
            normalizer = s.logsumexp(-1, keepdim=True)
            total += ((normalizer - s.gather(-1, y)) * counts).sum()
            if wants_h or wants_W:
                ds = s.sub_(normalizer).exp_().scatter_add_(-1, y, -torch.ones_like(normalizer)).mul_(counts)
                if grad_h is not None:
                    grad_h[part] = (ds @ W).to(h.dtype)
                if grad_W is not None:
                    grad_W.addmm_(ds.T, x)
        ctx.save_for_backward(grad_h, None if grad_W is None else grad_W.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # The saved gradients are constants, so under create_graph their derivative would silently be zero.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("this loss has no second derivative; use F.cross_entropy on the logits of the head")
        grad_h, grad_W = (None if g is None else g * grads[0].to(g.dtype) for g in ctx.saved_tensors)
        return grad_h, grad_W, None, None, None
