"""Muon and AdamW in one optimizer, for whole and for sharded parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from ...base.numerics import polar_express

MATCHED_RMS = 0.18
"""The root mean square of a Muon update at rate 1, equal to AdamW's, so that both share a rate and a decay."""
BATCHED_NUMEL = 2**26
"""The number of elements in a rank's share of one batch of equal shapes, which bounds a step's memory."""


class MuonAdamW(Optimizer):
    """Muon for groups of the kind "muon", AdamW for those of the kind "adamw"; a group has its own lr and weight_decay.

    Muon: M <- 0.95 M + g,  U = g + 0.95 M,  p <- (1 - lr wd) p - lr 0.18 sqrt(max(m, n)) polar(U) for each m x n matrix
    in the last two axes of p, so that an update has the RMS 0.18 lr. AdamW: betas 0.9 and 0.95, eps 1e-8.

    Sharded parameters (DTensors) are welcome: every matrix is put together on one rank and orthogonalized there, and
    experts where they live.

    Reference: Jordan et al., "Muon", 2024; Liu et al., "Muon is Scalable for LLM Training", 2025; Loshchilov and
    Hutter, "Decoupled Weight Decay Regularization", 2019.

    >>> p = torch.nn.Parameter(torch.zeros(4, 8))
    >>> p.grad = torch.randn(4, 8)
    >>> MuonAdamW([{"params": [p], "kind": "muon", "lr": 1.0, "weight_decay": 0.1}]).step()
    >>> round(p.square().mean().sqrt().item(), 2)
    0.18
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        polar_steps: int = 6,
    ):
        # With `fused` among a group's keys, torch loads AdamW's step counts to where the fused kernel expects them.
        defaults = {"momentum": momentum, "betas": betas, "eps": eps, "polar_steps": polar_steps, "fused": True}
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for key in ("kind", "lr", "weight_decay"):
            if key not in param_group:
                raise ValueError(f"a group needs {key!r}, got {sorted(param_group)}; parameter_groups makes them.")
        if param_group["kind"] not in ("muon", "adamw"):
            raise ValueError(f"a group's kind is 'muon' or 'adamw', got {param_group['kind']!r}.")
        for key in ("lr", "weight_decay"):
            if not param_group[key] >= 0:
                raise ValueError(f"{key} must not be negative, got {param_group[key]}.")
        super().add_param_group(param_group)
        if param_group["kind"] == "muon" and any(p.ndim < 2 for p in param_group["params"]):
            raise ValueError("a Muon group holds a parameter that is not a matrix; put it into an AdamW group.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, skip: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient; do nothing if the on-device number `skip` is 1.0."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.prepare()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["kind"] == "muon":
                for batch in equal_shapes(parameters):
                    self._muon(batch, group, skip)
            else:
                self._adamw(parameters, group, skip)
        return loss

    def prepare(self) -> None:
        """Create the state of all parameters, even those without a gradient, so that every checkpoint contains it."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if state:
                    continue
                if group["kind"] == "muon":
                    state["momentum_buffer"] = torch.zeros_like(p)
                else:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)

    def _muon(self, batch: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        lr, beta = group["lr"], group["momentum"]
        updates = []
        for p in batch:
            grad, buffer = local(cast(Tensor, p.grad)), local(self.state[p]["momentum_buffer"])
            if skip is None:
                buffer.mul_(beta).add_(grad)
            else:
                buffer.copy_(torch.where(skip.bool(), buffer, buffer.mul(beta).add_(grad)))
            updates.append(grad.add(buffer, alpha=beta))
        scale = MATCHED_RMS * math.sqrt(max(batch[0].shape[-2:]))
        directions = orthogonalize(updates, like=batch[0], steps=group["polar_steps"])
        for p, direction in zip(batch, directions, strict=True):
            mine = local(p)
            moved = mine.mul(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr * scale)
            mine.copy_(moved if skip is None else torch.where(skip.bool(), mine, moved))

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            [local(p) for p in parameters],
            [local(cast(Tensor, p.grad)) for p in parameters],
            [local(self.state[p]["exp_avg"]) for p in parameters],
            [local(self.state[p]["exp_avg_sq"]) for p in parameters],
            [],
            [self.state[p]["step"] for p in parameters],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=skip,
        )


def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor; any other tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def equal_shapes(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Batches of equal shape, dtype and sharding, in an order and in sizes that agree on every rank."""
    alike: dict[Any, list[Tensor]] = {}
    for p in parameters:
        sharding = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        alike.setdefault((p.shape, p.dtype, p.device, sharding), []).append(p)
    for batch in alike.values():
        count = max(1, BATCHED_NUMEL * num_shards(batch[0]) // max(1, batch[0].numel()))
        # If matrices are assembled, each rank should get one.
        count = max(count, num_shards(batch[0]))
        yield from (batch[i : i + count] for i in range(0, len(batch), count))


def num_shards(p: Tensor) -> int:
    """The number of ranks a parameter is sharded over."""
    if not isinstance(p, DTensor):
        return 1
    sides = zip(p.placements, p.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sides if not isinstance(placement, Replicate))


def orthogonalize(updates: Sequence[Tensor], *, like: Tensor, steps: int) -> Sequence[Tensor]:
    """The polar factors of `updates`, a rank's parts of tensors that are shaped and sharded like `like`.

    Ranks with rows of the same matrices, or with copies of the same, share the work: each takes some, whole, and hands
    the factors back. Experts that are sharded over experts are whole where they are, and stay there.
    """
    stacked = torch.stack(tuple(updates))
    if not isinstance(like, DTensor):
        return polar_express(stacked, steps).unbind()
    mesh, sides = like.device_mesh, [i for i, p in enumerate(like.placements) if shares_matrices(p, like.ndim)]
    if not sides:
        return polar_express(stacked, steps).unbind()
    if len(sides) == mesh.ndim:
        shape, placements = torch.Size((len(updates), *like.shape)), like.placements
    else:
        # Whole matrices may have copies on other ranks, so they are divided one by one.
        assert mesh.mesh_dim_names is not None and all(isinstance(like.placements[i], Replicate) for i in sides)
        mesh, placements = mesh[tuple(mesh.mesh_dim_names[i] for i in sides)], [Replicate()] * len(sides)
        stacked = stacked.flatten(0, -3)
        shape = stacked.shape
    wrap = functools.partial(
        DTensor.from_local,
        device_mesh=mesh,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    in_parts = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in placements]
    # An all-to-all turns some rows of all matrices into all rows of some, so that each rank works on whole matrices.
    whole = wrap(stacked, placements=in_parts).redistribute(placements=[Shard(0)] * mesh.ndim)
    polar = polar_express(whole.to_local(), steps).contiguous()
    parts = wrap(polar, placements=whole.placements).redistribute(placements=in_parts).to_local()
    return parts.view(len(updates), *updates[0].shape).unbind()


def shares_matrices(placement: Placement, ndim: int) -> bool:
    """Whether ranks along a mesh dimension hold parts of the same matrices, or copies of them."""
    return isinstance(placement, Replicate) or (isinstance(placement, Shard) and placement.dim >= ndim - 2)
