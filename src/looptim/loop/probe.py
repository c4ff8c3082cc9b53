"""Loops run on random inputs in float64, for the questions that numbers answer."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .loop import Loop
from .rules import Carry
from .transition import Record, Transition


def float64_copy(loop: Loop, *, perturb: float = 0.0) -> Loop:
    """A copy in float64 on the CPU, in eval mode, its parameters randomly changed by about `perturb`."""
    if any(tensor.is_meta for tensor in itertools.chain(loop.parameters(), loop.buffers())):
        raise ValueError(f"{loop.name} is on the meta device and has no values; build it on another")
    loop = copy.deepcopy(loop).to("cpu", torch.float64).eval()
    generator = torch.Generator("cpu").manual_seed(1)
    for p in loop.parameters() if perturb else ():
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu")
        p.data.add_(perturb * (noise / math.sqrt(p.shape[-1]) if p.dim() > 1 else 0.3 * noise))
    return loop


def changed_copy(loop: Loop) -> Loop | None:
    """A copy at randomly changed parameters, or None: a user's may have bounds that any change violates."""
    twins = (float64_copy(loop, perturb=scale) for scale in (1.0, 0.1, 0.01))
    return next((twin for twin in twins if all(is_finite(record) for _, _, record in run(twin))), None)


def is_finite(record: Record) -> bool:
    """Whether a step's state and both its writes are finite."""
    return all(bool(t.isfinite().all()) for t in (record.Y, record.H.write(record.g), record.x.write(record.g)))


def random_input(loop: Loop, batch: int = 2, tokens: int = 5) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """An input of normal numbers, and a fixed random network that acts on each token in place of the blocks."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    M = normal(loop.width, loop.width) / math.sqrt(loop.width)
    return normal(batch, tokens, loop.width), lambda o: o + torch.tanh(o @ M)


def run(loop: Loop) -> Iterator[tuple[Transition, Carry, Record]]:
    """Every step of the loop on a random input, with what it carried before."""
    e, blocks = random_input(loop)
    with torch.no_grad():
        Y = loop.start(e)
        carry = loop.schedule()[0].rule.init(Y)
        for transition in loop.schedule():
            record = transition.step(Y, e, blocks, carry)
            yield transition, carry, record
            Y, carry = record.Y, record.carry
