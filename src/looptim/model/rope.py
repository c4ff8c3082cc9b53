"""Rotary position embedding of the leading part of each head."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.numerics import few_without_grad, is_plain

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def rope_table(
    positions: Int[Tensor, "*batch length"], rotary_width: int, theta: float, *, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "*batch length half"], Float[Tensor, "*batch length half"]]:
    """Cosines and sines of the rotation angles, in fp32 unless a wider dtype is asked for.

    angle[t, i] = positions[t] * theta^(-2 i / rotary_width), i < rotary_width / 2.

    Reference: Su et al., "RoFormer", 2021.

    >>> cos, sin = rope_table(torch.arange(5), rotary_width=4, theta=1e4)
    >>> cos.shape, sin[0]
    (torch.Size([5, 2]), tensor([0., 0.]))
    """
    if rotary_width <= 0 or rotary_width % 2:
        raise ValueError(f"rotary_width must be even and positive, got {rotary_width}: rotations act on pairs.")
    find = frequencies if is_plain(positions) else frequencies.__wrapped__
    angles = positions.unsqueeze(-1).to(dtype) * find(rotary_width, theta, dtype, positions.device)
    return angles.cos(), angles.sin()


@functools.lru_cache(maxsize=64)
def frequencies(rotary_width: int, theta: float, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " half"]:
    """The angle by which each pair turns from one position to the next."""
    # What is first made under inference_mode could not be saved for a later backward.
    with torch.inference_mode(False):
        return theta ** -(torch.arange(0, rotary_width, 2, device=device, dtype=dtype) / rotary_width)


def apply_rope(
    x: Float[Tensor, "batch heads length dim"],
    cos: Float[Tensor, "*batch length half"],
    sin: Float[Tensor, "*batch length half"],
) -> Float[Tensor, "batch heads length dim"]:
    """Rotate the pairs (i, i + half) of the first 2 * half dims, in fp32 or wider; the rest passes through.

    y_i = x_i cos - x_{i+half} sin,  y_{i+half} = x_{i+half} cos + x_i sin.

    The pairing is that of Llama and transformers ("rotate half").
    """
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"rotary_width {2 * half} exceeds the head dim {x.shape[-1]}: make it smaller.")
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if torch.compiler.is_compiling() or few_without_grad(x):
        return rotate_by_formula(x, cos, sin)
    y = Rotation.apply(x, cos, sin)
    assert isinstance(y, Tensor)
    return y


def rotate_by_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition; a compiler turns it into one kernel."""
    half = cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    first, second, rest = (part.to(dtype) for part in x.split([half, half, x.shape[-1] - 2 * half], dim=-1))
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat([*turned, rest], dim=-1).to(x.dtype)


def rotation_matrix(cos: Float[Tensor, "1 half"], sin: Float[Tensor, "1 half"], dim: int) -> Float[Tensor, "dim dim"]:
    """The rotation of one position as a matrix `M`: `apply_rope(x) = x M`, one call where there is little to compute.

    >>> x, table = torch.randn(1, 2, 1, 8), rope_table(torch.tensor([5]), 4, 1e4)
    >>> torch.allclose(apply_rope(x, *table), x @ rotation_matrix(*table, 8), atol=1e-6)
    True
    """
    half = cos.shape[-1]
    matrix = torch.cat([cos.flatten(), cos.flatten(), cos.new_ones(dim - 2 * half)]).diag()
    matrix.diagonal(half)[:half].copy_(sin.flatten())
    matrix.diagonal(-half)[:half].copy_(sin.flatten()).neg_()
    return matrix


class Rotation(torch.autograd.Function):
    """The same rotation for eager mode, without concatenation; its backward pass is the rotation by -angle."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        # The halves are copied, since arithmetic on strided halves takes 1.3 to 2.1 times as long in fp32.
        first = x[..., :half].to(dtype, copy=True)
        second = x[..., half : 2 * half].to(dtype, copy=True)
        y = torch.empty_like(x)
        y[..., :half] = (first * cos).addcmul_(second, sin, value=-1)
        y[..., half : 2 * half] = second.mul_(cos).addcmul_(first, sin)
        y[..., 2 * half :] = x[..., 2 * half :]
        return y

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, cos, sin = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple:
        cos, sin = ctx.saved_tensors
        return Rotation.apply(grads[0], cos, -sin), None, None
