"""The learning rate of a step, and global gradient clipping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from .muon import local


def learning_rate(step: int, *, peak: float, minimum: float = 1e-5, warmup: int, total: int) -> float:
    """The rate of step 0, 1, ...: a line to the peak, reached by step `warmup - 1`, then a cosine to the minimum.

    With t = step + 1: peak t / warmup up to t = warmup, then minimum + (peak - minimum) (1 + cos(pi s)) / 2 with
    s = (t - warmup) / (total - warmup); the last step, `total - 1`, has the minimum, and so have any after it.

    >>> [round(learning_rate(step, peak=1.0, minimum=0.1, warmup=2, total=6), 3) for step in range(6)]
    [0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if total < 1:
        raise ValueError(f"total must be at least one step, got {total}.")
    if not 0 <= warmup < total:
        raise ValueError(f"warmup must be at least 0 and end before the {total} steps do, got {warmup}.")
    if not 0 <= minimum <= peak:
        raise ValueError(f"the minimum must lie between 0 and the peak of {peak}, got {minimum}.")
    if step < 0:
        raise ValueError(f"steps count from 0, got {step}.")
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step + 1 - warmup) / (total - warmup))
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm), where norm is their global norm over all ranks; returns the norm.

    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([3.0, 4.0])
    >>> clip_gradients([p], 1.0), p.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}; to leave gradients unclipped, pass math.inf.")
    by_mesh: dict[Any, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            # torch sums norms over a single mesh only.
            by_mesh.setdefault(getattr(p.grad, "device_mesh", None), []).append(p.grad)
    if not by_mesh:
        return torch.zeros(())
    norms = [get_total_norm(grads) for grads in by_mesh.values()]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in itertools.chain(*by_mesh.values()):
        local(grad).mul_(scale)
    return norm
