"""Numerics that loop, model and optimizer share: full precision, RMS norm, Polar Express. Needs only torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def wide(x: Tensor) -> Tensor:
    """`x` in fp32, or in float64 if it already is; norms, maps, steps and decays are computed in this dtype."""
    # Even a call of torch that does nothing costs as much as a small operation.
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.promote_types(x.dtype, torch.float32))


def full_precision(x: Tensor) -> AbstractContextManager:
    """A context without autocast on the device of `x`, so that a small matmul is not cast back to bf16."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer would compute `x` here."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


FLOOR = 1e-3
"""A vector with a smaller root mean square is too small to be scaled to a given length."""


def floored_norm(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """`max(|x|, sqrt(n) FLOOR)` over the `n` entries of `dim`, with the axis kept: a safe divisor for a vector.

    This is the one safe normalization: `x / floored_norm(x)` has unit length unless `x` is tiny, where it is
    proportional to `x`. Its derivative nowhere exceeds `1 / (sqrt(n) FLOOR)`.

    >>> x = torch.zeros(4, requires_grad=True)
    >>> (x / floored_norm(x)).sum().backward()
    >>> x.grad.round().tolist(), floored_norm(torch.tensor([3.0, 4.0])).item()
    ([500.0, 500.0, 500.0, 500.0], 5.0)
    """
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    return norm.clamp_min(FLOOR * math.sqrt(x.numel() // max(1, norm.numel())))


def rms_norm(x: Float[Tensor, "... width"], gain: Float[Tensor, " width"], eps: float) -> Float[Tensor, "... width"]:
    """`x / sqrt(mean(x^2) + eps) * (1 + gain)`, computed in fp32 or wider and returned in the dtype of `x`.

    Reference: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    >>> rms_norm(torch.tensor([3.0, -3.0]), torch.zeros(2), 1e-5).round(decimals=3).tolist()
    [1.0, -1.0]
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if few_without_grad(x):
        y = unit_rms_of_few(wide(x), eps)
        return torch.addcmul(y, y, gain.to(dtype)).to(x.dtype)
    scale = 1 + gain.to(dtype)
    # On a CPU, eager F.rms_norm takes 1.3 to 3.6 times as long; elsewhere it is one kernel.
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return F.rms_norm(x.to(dtype), scale.shape, scale, eps).to(x.dtype)
    y = RMSNormFunction.apply(x, scale, eps)
    assert isinstance(y, Tensor)
    return y


def few_without_grad(x: Tensor) -> bool:
    """Whether these are the few tokens of a decode step on a CPU, where the overhead of calls exceeds their work."""
    few = x.numel() <= FEW_NUMEL and not torch.is_grad_enabled() and x.device.type == "cpu"
    return few and is_plain(x)


def is_plain(x: Tensor) -> bool:
    """Whether what is computed for `x` may be kept for others; that of a fake tensor or of a compiler may not."""
    return not torch.compiler.is_compiling() and type(x) is Tensor


def unit_rms_of_few(x: Float[Tensor, "... width"], eps: float) -> Float[Tensor, "... width"]:
    """`x / sqrt(mean(x^2) + eps)` in two calls: torch runs an RMS norm as five on a CPU, a layer norm as one.

    The layer norm of `x` beside `-x`, whose mean is zero, is the RMS norm of both.
    """
    return F.layer_norm(x.unsqueeze(-1) * _both_signs(x.dtype), (x.shape[-1], 2), eps=eps)[..., 0]


@functools.cache
def _both_signs(dtype: torch.dtype) -> Tensor:
    # What is first made under inference_mode could not be used outside of it.
    with torch.inference_mode(False):
        return torch.tensor([1.0, -1.0], dtype=dtype)


FEW_NUMEL = 2**11
"""Up to this many elements, a call on a CPU costs more than its work."""


class RMSNormFunction(torch.autograd.Function):
    """y = x r scale with r = 1/rms(x). It saves only x, and reads it as few times as eager mode can."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, eps: float) -> Tensor:
        x_wide = x.to(scale.dtype)
        return (x_wide * inverse_rms(x_wide, eps)).mul_(scale).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, scale, ctx.eps = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        # Every operation here is differentiable in the saved inputs, so that second derivatives are right.
        x, scale = ctx.saved_tensors
        x_wide = x.to(scale.dtype)
        r = inverse_rms(x_wide, ctx.eps)
        direct = grads[0].to(scale.dtype) * r
        grad_scale = (direct * x_wide).reshape(-1, x.shape[-1]).sum(0)
        direct = direct * scale
        radial = torch.linalg.vecdot(direct, x_wide).unsqueeze(-1) * r.square() / x.shape[-1]
        return torch.addcmul(direct, x_wide, radial, value=-1).to(x.dtype), grad_scale, None


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept."""
    # A norm only reads x, while square().mean() also writes a copy of it.
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)


# Polar Express (Amsel et al., 2025): six odd polynomials that together take singular values in [1e-3, 1] to 1 +- 0.007.
# The safety factor of 1.01 is already applied.
POLAR_EXPRESS = (
    (8.205160414005574, -22.90193498705605, 16.460724910180314),
    (4.066395159942775, -2.8611540867551426, 0.5183995226694741),
    (3.9095949044379155, -2.823351735039516, 0.5250369769390025),
    (3.2855640171986153, -2.415301959635945, 0.48529406552790866),
    (2.277873287083977, -1.619821765265441, 0.39848078704168355),
    (1.8725756512746514, -1.2307042574884297, 0.35851616209511666),
)


def polar(M: Float[Tensor, "*batch r d"]) -> Float[Tensor, "*batch r d"]:
    """The polar factor `(M M^T)^{-1/2} M` of wide matrices by Polar Express; smooth, so gradients can pass through it.

    >>> polar(torch.diag(torch.tensor([3.0, 4.0]))).round(decimals=1)
    tensor([[1., 0.],
            [0., 1.]])
    """
    X = M / (1.01 * torch.linalg.vector_norm(M, dim=(-2, -1), keepdim=True) + 1e-12)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


Triples = Sequence[tuple[float, float, float]]

CACHED_NUMEL = 2**17
"""Elements orthogonalized at once on a CPU: batching speeds up small matrices, but not beyond the cache."""


def polar_express(G: Tensor, steps: int = 6) -> Tensor:
    """The polar factor U V^T of each matrix G = U S V^T in the last two axes, by odd polynomials.

    X_0 = G / (1.01 |G|_F + 1e-7),  X <- a X + (b A + c A^2) X with A = X X^T, on the transpose of a tall G.

    Six steps take singular values in [1e-3, 1] of the norm into [0.993, 1.002]; fewer stop on the way, later ones
    repeat the last polynomial. A zero matrix stays zero.

    Reference: Amsel et al., "The Polar Express", 2025.

    >>> polar_express(torch.diag(torch.tensor([3.0, -4.0]))).round(decimals=1)
    tensor([[ 1.,  0.],
            [ 0., -1.]])
    """
    if G.ndim < 2:
        raise ValueError(f"only matrices have a polar factor, got the shape {tuple(G.shape)}; leave vectors to AdamW.")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}; Polar Express was made for 6.")
    tall = G.shape[-2] > G.shape[-1]
    X = (G.mT if tall else G).to(polar_dtype(G))
    X = X.flatten(0, -3) if X.ndim > 2 else X.unsqueeze(0)
    triples = [*POLAR_EXPRESS[:steps], *POLAR_EXPRESS[-1:] * (steps - len(POLAR_EXPRESS))]
    iterate = iterate_gram if gram_pays(X) else iterate_plain
    batch = max(1, CACHED_NUMEL // max(1, G.shape[-2] * G.shape[-1])) if G.device.type == "cpu" else max(1, len(X))
    with full_precision(X):
        X = X / (1.01 * torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True) + 1e-7)
        X = torch.cat([iterate(part, triples) for part in X.split(batch)])
    return (X.mT if tall else X).reshape(G.shape).to(G.dtype)


def polar_dtype(G: Tensor) -> torch.dtype:
    """The dtype to iterate in: that of G where its matmuls are fast or exact, and fp32 otherwise."""
    # A CPU without AMX multiplies bf16 at half the speed of fp32, and bf16 leaves singular values up to 1.31.
    if G.dtype == torch.bfloat16 and G.device.type != "cpu":
        return G.dtype
    return torch.promote_types(G.dtype, torch.float32)


def gram_pays(X: Tensor) -> bool:
    """Whether the Gram form is faster and safe: matrices at least twice as wide as high, multiplied in true fp32."""
    # In bf16, and in what replaces fp32 below "highest" precision, squaring the condition number makes it diverge.
    exact = X.dtype == torch.float64 or (X.dtype == torch.float32 and _multiplies_exactly())
    return exact and X.shape[-1] >= 2 * X.shape[-2]


def _multiplies_exactly() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # torch refuses to answer if the precision was set through its newer API.
        return False


def iterate_plain(X: Tensor, triples: Triples) -> Tensor:
    """X <- a X + (b A + c A^2) X with A = X X^T, once per triple: the definition."""
    for a, b, c in triples:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def iterate_gram(X: Tensor, triples: Triples) -> Tensor:
    """The same on the small A alone: P = a I + b A + c A^2, Q <- P Q, A <- P A P; X <- Q X every third triple."""
    # Rounding errors of A (6e-8) swamp squared singular values of 1e-6. Without returning to X halfway, singular values
    # of 1e-3 would end at 0.967; after three triples they have grown to 0.13.
    for start in range(0, len(triples), 3):
        A = X @ X.mT
        Q = P = polynomial(A, triples[start])
        for triple in triples[start + 1 : start + 3]:
            A = P @ A @ P
            P = polynomial(A, triple)
            Q = P @ Q
        X = Q @ X
    return X


def polynomial(A: Tensor, triple: tuple[float, float, float]) -> Tensor:
    """a I + b A + c A^2."""
    a, b, c = triple
    P = torch.baddbmm(A, A, A, beta=b, alpha=c)
    P.diagonal(dim1=-2, dim2=-1).add_(a)
    return P
