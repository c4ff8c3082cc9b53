"""Polar Express: the polar factor of batches of matrices by matmuls alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..loop.part import full_precision
from ..loop.rules import POLAR_EXPRESS

Triples = Sequence[tuple[float, float, float]]

CACHED_NUMEL = 2**17
"""Elements orthogonalised together on a CPU: small matrices gain up to half, stacks that leave the cache lose."""


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
    """What to iterate in: G's own dtype where its matmuls are fast or exact, else fp32."""
    # A CPU without AMX multiplies bf16 at half the speed of fp32, and bf16 leaves singular values up to 1.31.
    if G.dtype == torch.bfloat16 and G.device.type != "cpu":
        return G.dtype
    return torch.promote_types(G.dtype, torch.float32)


def gram_pays(X: Tensor) -> bool:
    """Whether the Gram form is faster and safe: matrices at least twice as wide as high, multiplied in full fp32."""
    # In bf16, and so in what stands in for fp32 below "highest", squaring the condition number lets it blow up.
    exact = X.dtype == torch.float64 or (X.dtype == torch.float32 and _multiplies_exactly())
    return exact and X.shape[-1] >= 2 * X.shape[-2]


def _multiplies_exactly() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # Somebody chose a precision by torch's newer names, which this one cannot tell.
        return False


def iterate_plain(X: Tensor, triples: Triples) -> Tensor:
    """X <- a X + (b A + c A^2) X, A = X X^T, once per triple: the definition."""
    for a, b, c in triples:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def iterate_gram(X: Tensor, triples: Triples) -> Tensor:
    """The same on the small A alone: P = a I + b A + c A^2, Q <- P Q, A <- P A P, and X <- Q X after three triples."""
    # Without the return to X half-way, A's rounding error, 6e-8 beside squared singular values of 1e-6, is all there
    # is to go by: singular values of 1e-3 then end at 0.967. Three steps have made them 0.13.
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
