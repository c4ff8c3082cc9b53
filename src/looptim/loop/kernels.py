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

CHUNK_NUMEL = 2**17
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
    """`read`, saving only the state and n + 1 numbers per token."""

    @staticmethod
    def forward(ctx, Y: Tensor, W: Tensor, a: Tensor, b: Tensor, gain: float) -> tuple[Tensor, Tensor, Tensor]:
        r, d = Y.shape[-2:]
        flat = Y.reshape(-1, r * d)
        v, s = flat.new_empty(len(flat), len(W), dtype=W.dtype), flat.new_empty(len(flat), 1, dtype=W.dtype)
        o = flat.new_empty(len(flat), d)
        with full_precision(Y):
            for part in chunks(flat):
                y = flat[part].to(W.dtype)
                norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
                s[part] = norm.square_().div_(r * d).add_(EPS).rsqrt_().clamp_max_(1 / FLOOR)
                v[part] = torch.addcmul(b, y @ W.T, a * s[part]).sigmoid_()
                h = gain * v[part, :r].unsqueeze(-2)
                o[part] = (h @ y.unflatten(-1, (r, d))).squeeze(-2)
        ctx.gain = gain
        ctx.save_for_backward(Y, W, a, b, v, s)
        return o.view(*Y.shape[:-2], d), v.view(*Y.shape[:-2], -1), Y.view_as(Y)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        Y, W, a, b, v, s = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (*differentiate(read_formula, (Y, W, a, b), (ctx.gain,), grads), None)
        grad_o, grad_v, grad_Y = (grad.reshape(len(v), -1) for grad in grads)
        r, d = Y.shape[-2:]
        flat, result = Y.reshape(len(v), -1), Y.new_empty(len(v), r * d)
        grad_W, grad_a, grad_b = torch.zeros_like(W), torch.zeros_like(a), torch.zeros_like(b)
        with full_precision(Y):
            for part in chunks(flat):
                y, streams = flat[part].to(W.dtype), flat[part].to(W.dtype).unflatten(-1, (r, d))
                error = grad_o[part].to(W.dtype).unsqueeze(-2)
                value, scale = v[part], s[part]
                dv = grad_v[part].clone()
                dv[:, :r] += ctx.gain * (streams * error).sum(-1)
                dz = dv * value * (1 - value)
                projected = y @ W.T
                grad_a += (dz * projected * scale).sum(0)
                grad_b += dz.sum(0)
                dz = dz * a
                # Below the floor the scale is a constant.
                curvature = torch.where(scale < 1 / FLOOR, scale**3 / (-r * d), 0.0)
                radial = (dz * projected).sum(-1, keepdim=True) * curvature
                dz = dz * scale
                grad_W.addmm_(dz.T, y)
                dY = torch.addmm(grad_Y[part].to(W.dtype), dz, W).addcmul_(y, radial)
                h = ctx.gain * value[:, :r].unsqueeze(-1)
                result[part] = dY.unflatten(-1, (r, d)).addcmul_(h, error).flatten(-2)
        return result.view_as(Y), grad_W, grad_a, grad_b, None


class Write(torch.autograd.Function):
    """`write`, saving its inputs."""

    @staticmethod
    def forward(ctx, Y: Tensor, g: Tensor, k: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(Y, g, k, w)
        flat, Y_next = Y.reshape(-1, *Y.shape[-2:]), torch.empty_like(Y)
        g, k, w = g.reshape(len(flat), 1, -1), k.reshape(len(flat), -1, 1), w.reshape(len(flat), -1, 1)
        target = Y_next.view_as(flat)
        for part in chunks(flat):
            target[part] = (k[part] * flat[part]).addcmul_(w[part], g[part].to(k.dtype), value=-1)
        return Y_next

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        Y, g, k, w = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return tuple(differentiate(write_formula, (Y, g, k, w), (), grads))
        flat, grad = Y.reshape(-1, *Y.shape[-2:]), grads[0].reshape(-1, *Y.shape[-2:])
        keep, step, error = k.reshape(len(flat), -1, 1), w.reshape(len(flat), 1, -1), g.reshape(len(flat), 1, -1)
        grad_Y, grad_g = torch.empty_like(Y), torch.empty_like(g)
        grad_k, grad_w = torch.empty_like(k), torch.empty_like(w)
        for part in chunks(flat):
            G = grad[part].to(k.dtype)
            grad_Y.view_as(flat)[part] = keep[part] * G
            grad_g.view_as(error)[part] = -(step[part] @ G)
            grad_k.view(len(flat), -1)[part] = (G * flat[part]).sum(-1)
            grad_w.view(len(flat), -1)[part] = -(G * error[part]).sum(-1)
        return grad_Y, grad_g, grad_k, grad_w


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
