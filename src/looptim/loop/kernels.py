"""The two heavy operations of a stream transition, each one function with a hand-written derivative.

`read`: `v = sigmoid(a * (s W Y) + b)` for all controllers at once, with `s = 1 / rms(Y)` applied after the projection,
and `o = h Y`, where `h` is `gain` times the first r of `v`. `write`: `Y' = k Y - w g`, without an r x r matrix.

Tokens go in chunks that stay in the cache on a CPU: what is read again is read from there, and no large temporary
tensor is made. Differentiated twice, both are differentiated as the plain formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.numerics import FLOOR, few_without_grad, full_precision, wide

if TYPE_CHECKING:
    from jaxtyping import Float

EPS = 1e-20
"""Epsilon of the controllers' RMS norm, as released."""

CHUNK_NUMEL = 2**18
"""Elements of the state to process at a time on a CPU."""


def read(
    Y: Float[Tensor, "B T r d"], W: Float[Tensor, "n rd"], a: Float[Tensor, " n"], b: Float[Tensor, " n"], gain: float
) -> tuple[Float[Tensor, "B T d"], Float[Tensor, "B T n"], Float[Tensor, "B T r d"]]:
    """The block input, every controller's sigmoid, and the state again, to be passed to `write`.

    The state is returned so that both of its gradients meet here, in one pass.
    """
    if few_without_grad(Y):
        return read_few(Y, W, a, b, gain)
    o, v, Y = Read.apply(Y, W, a, b, gain)  # pyright: ignore[reportGeneralTypeIssues]
    return o, v, Y


def write(
    Y: Float[Tensor, "B T r d"], g: Float[Tensor, "B T d"], k: Float[Tensor, "B T r"], w: Float[Tensor, "B T r"]
) -> Float[Tensor, "B T r d"]:
    """`Y' = k Y - w g` in fp32 or wider, rounded once to the dtype of the state."""
    if few_without_grad(Y):
        return torch.addcmul(k.unsqueeze(-1) * Y, w.unsqueeze(-1), g.unsqueeze(-2), value=-1).to(Y.dtype)
    Y_next = Write.apply(Y, g, k, w)
    assert isinstance(Y_next, Tensor)
    return Y_next


def read_formula(Y: Tensor, W: Tensor, a: Tensor, b: Tensor, gain: float) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `read`."""
    with full_precision(Y):
        flat = wide(Y.flatten(-2))
        s = torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS).clamp_max(1 / FLOOR)
        v = torch.sigmoid(a * (s * (flat @ W.T)) + b)
        h = gain * v[..., : Y.shape[-2]]
        return (h.unsqueeze(-1) * Y).sum(-2).to(Y.dtype), v, Y


def read_few(Y: Tensor, W: Tensor, a: Tensor, b: Tensor, gain: float) -> tuple[Tensor, Tensor, Tensor]:
    """`read` in as few calls as there can be. `EPS` is nothing beside the floor."""
    with full_precision(Y):
        flat = wide(Y).flatten(-2)
        root = math.sqrt(flat.shape[-1])
        norm = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).clamp_min_(FLOOR * root)
        v = torch.addcmul(b, flat @ W.T, a / norm, value=root).sigmoid_()
        h = v[..., : Y.shape[-2]] if gain == 1 else gain * v[..., : Y.shape[-2]]
        return (h.unsqueeze(-2) @ wide(Y)).squeeze(-2).to(Y.dtype), v, Y


def write_formula(Y: Tensor, g: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """The definition of `write`."""
    return (k.unsqueeze(-1) * Y - w.unsqueeze(-1) * g.unsqueeze(-2)).to(Y.dtype)


class Read(torch.autograd.Function):
    """`read`, saving only the state and n + 1 numbers per token.

    Only what is as wide as the state goes in chunks; the few numbers of each token are computed for all tokens at once.
    """

    @staticmethod
    def forward(ctx, Y: Tensor, W: Tensor, a: Tensor, b: Tensor, gain: float) -> tuple[Tensor, Tensor, Tensor]:
        r, d = Y.shape[-2:]
        flat, root = Y.reshape(-1, r * d), math.sqrt(r * d)
        o = flat.new_empty(len(flat), 1, d)
        norms, products = [], []
        with full_precision(Y):
            for part in chunks(flat):
                y = flat[part].to(W.dtype)
                norms.append(torch.linalg.vector_norm(y, dim=-1, keepdim=True))
                # This order of the factors is up to twice as fast, since there are so few of them.
                products.append(W @ y.T)
            # `EPS` is nothing beside the floor.
            s = root / torch.cat(norms).clamp_min_(FLOOR * root)
            v = torch.addcmul(b, torch.cat(products, dim=1).T, a * s).sigmoid_().contiguous()
            h = (gain * v[:, :r]).unsqueeze(-2)
            for part in chunks(flat):
                o[part] = h[part] @ flat[part].to(W.dtype).unflatten(-1, (r, d))
        ctx.gain = gain
        ctx.save_for_backward(Y, W, a, b, v, s)
        return o.view(*Y.shape[:-2], d), v.view(*Y.shape[:-2], -1), Y.view_as(Y)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        Y, W, a, b, v, s = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (*differentiate(read_formula, (Y, W, a, b), (ctx.gain,), grads), None)
        r, d = Y.shape[-2:]
        flat, streams = Y.reshape(len(v), -1), Y.reshape(len(v), r, d)
        error, grad_Y = grads[0].reshape(len(v), 1, d), grads[2].reshape(len(v), -1)
        grad_W, sums = torch.zeros_like(W), torch.empty_like(flat, dtype=W.dtype)
        with full_precision(Y):
            dh = [streams[part].to(W.dtype) @ error[part].to(W.dtype).mT for part in chunks(flat)]
            dv = grads[1].reshape(len(v), -1).clone()
            dv[:, :r].add_(torch.cat(dh).squeeze(-1), alpha=ctx.gain)
            dz = dv * v * (1 - v)
            # What the bias is added to is found from the sigmoid, so that it need not be multiplied again.
            z = torch.logit(v, torch.finfo(v.dtype).eps) - b
            # Below the floor the scale is a constant.
            radial = (dz * z).sum(-1, keepdim=True) * torch.where(s < 1 / FLOOR, s.square() / (-r * d), 0.0)
            grad_b, dz, h = dz.sum(0), dz * s, (ctx.gain * v[:, :r]).unsqueeze(-1)
            dp = dz * a
            for part in chunks(flat):
                y = flat[part].to(W.dtype)
                grad_W.addmm_(dz[part].T, y)
                dY = torch.addcmul(grad_Y[part].to(W.dtype), y, radial[part], out=sums[part])
                dY.addmm_(dp[part], W).view(-1, r, d).addcmul_(h[part], error[part].to(W.dtype))
        return sums.to(Y.dtype).view_as(Y), a.unsqueeze(-1) * grad_W, (W * grad_W).sum(-1), grad_b, None


class Write(torch.autograd.Function):
    """`write`, saving its inputs."""

    @staticmethod
    def forward(ctx, Y: Tensor, g: Tensor, k: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(Y, g, k, w)
        flat, Y_next = Y.reshape(-1, *Y.shape[-2:]), torch.empty_like(Y)
        g, k, w = g.reshape(len(flat), 1, -1), k.reshape(len(flat), -1, 1), w.reshape(len(flat), -1, 1)
        for part in chunks(flat):
            kept = k[part] * flat[part]
            torch.addcmul(kept, w[part], g[part].to(k.dtype), value=-1, out=Y_next.view_as(flat)[part])
        return Y_next

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        Y, g, k, w = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return tuple(differentiate(write_formula, (Y, g, k, w), (), grads))
        flat, grad = Y.reshape(-1, *Y.shape[-2:]), grads[0].reshape(-1, *Y.shape[-2:])
        keep, step, error = k.reshape(len(flat), -1, 1), -w.reshape(len(flat), 1, -1), g.reshape(len(flat), 1, -1)
        grad_Y, grad_g = torch.empty_like(Y), torch.empty_like(g)
        dk, dw = [], []
        with full_precision(Y):
            for part in chunks(flat):
                G = grad[part].to(k.dtype)
                torch.mul(keep[part], G, out=grad_Y.view_as(flat)[part])
                grad_g.view_as(error)[part] = step[part] @ G
                dk.append((G * flat[part]).sum(-1))
                dw.append(G @ error[part].to(k.dtype).mT)
        return grad_Y, grad_g, torch.cat(dk).view_as(k), torch.cat(dw).neg_().view_as(w)


def chunks(flat: Tensor) -> Iterator[slice]:
    """Chunks of tokens that fit the cache of a CPU; a single chunk for a compiler and on a GPU."""
    size = max(len(flat), 1)
    if flat.device.type == "cpu" and not torch.compiler.is_compiling():
        size = max(1, CHUNK_NUMEL // flat[0].numel()) if len(flat) else 1
    return (slice(start, start + size) for start in range(0, len(flat), size))


def differentiate(formula, inputs: tuple[Tensor, ...], others: tuple, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of the plain formula, which can be differentiated again."""
    outputs = formula(*inputs, *others)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.autograd.grad(outputs, inputs, grads, create_graph=True, materialize_grads=True, allow_unused=True)
