"""States that are rebuilt in the backward pass instead of kept, so that memory hardly grows with the loop's steps.

A stream's write `Y' = k Y - w g` can be inverted, `Y = (Y' + w g) / k`, and the backward pass asks for the states from
the last to the first. So only `g`, `k` and `w` of each step, which the derivative needs anyway, and the last state are
kept. Dividing by `k` amplifies rounding. The forward pass therefore tracks a bound on the error with which each stream
of each token will be rebuilt, and keeps a stream wherever the bound would exceed `TOLERANCE`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .rules import Descent

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from .transition import Transition

TOLERANCE = 1e-4
"""The largest error that the bound may allow in a rebuilt stream, relative to the largest number of its token."""


def irreversible_part(transition: Transition) -> str | None:
    """The part that prevents a transition's states from being rebuilt; None if they can be.

    >>> import looptim as lo
    >>> irreversible_part(lo.build("operloop_muon", width=8, steps=2).transitions[0])
    'the direction Momentum of the rule'
    """
    # The fused form imports this module, so it is imported late.
    from .fused import unknown_part

    unknown = unknown_part(transition)
    if unknown is not None:
        return unknown
    rule = transition.rule
    assert isinstance(rule, Descent)
    if rule.directions:
        return f"the direction {type(rule.directions[0]).__name__} of the rule"
    return None if rule.retract is None else "the retraction of the rule"


class Written(NamedTuple):
    """The values that rebuild the state before a step from the one after it."""

    g: Float[Tensor, "B T d"]
    k: Float[Tensor, "B T r"]
    w: Float[Tensor, "B T r"]
    kept: Bool[Tensor, "B T r"]
    """The streams for which the bound was too large."""
    streams: Float[Tensor, "n d"]
    """The values of those streams, kept."""

    def undo(self, Y: Tensor) -> Tensor:
        """The state before the step."""
        before = torch.addcmul(Y.to(self.k.dtype), self.w.unsqueeze(-1), self.g.unsqueeze(-2)) / self.k.unsqueeze(-1)
        return before.to(Y.dtype).masked_scatter_(self.kept.unsqueeze(-1), self.streams)


@final
class Bound:
    """A bound, updated step by step, on how wrong the streams of the first state of a chain will be rebuilt.

    A state `Y` is rebuilt with an error of `(error of Y' + rounding) / |k|`; the forward and backward computations
    together round by at most `eps (3 |Y'| + 5 |k Y|)`. `error` is the sum over steps of rounding times `amplified`, the
    product of `1/|k|`.
    """

    def __init__(self, Y: Tensor):
        self.size = _largest(Y)
        self.error = torch.zeros_like(self.size)
        self.amplified = torch.zeros_like(self.size)

    def step(self, k: Float[Tensor, "B T r"], Y: Float[Tensor, "B T r d"]) -> Bool[Tensor, "B T r"]:
        """The streams to keep before a step that results in `Y`; a new chain begins after it for them."""
        size, k = _largest(Y), k.abs()
        rounding = torch.finfo(Y.dtype).eps * (3 * size + 5 * k * self.size)
        amplified = torch.maximum(self.amplified, 1 / self.size.amax(-1, keepdim=True)) / k
        error = self.error + rounding * amplified
        # A state of zeros, or a gate of exactly one, gives nothing to compare with.
        keep = ~(error <= TOLERANCE)
        self.size = size
        self.error, self.amplified = error.masked_fill(keep, 0), amplified.masked_fill(keep, 0)
        return keep


@final
class Chain:
    """A run of consecutive steps, and the state they end with."""

    def __init__(self, Y: Tensor):
        self.bound = Bound(Y)
        self.written: list[Written] = []
        self.last = self.rebuilt = Y
        self.version = Y._version
        self.at = 0
        """The step before which the most recently rebuilt state lies."""

    def append(self, Y: Tensor, Y_next: Tensor, g: Tensor, k: Tensor, w: Tensor) -> None:
        keep = self.bound.step(k, Y_next)
        self.written.append(Written(g, k, w, keep, Y[keep]))
        self.last = self.rebuilt = Y_next
        self.version = Y_next._version
        self.at = len(self.written)

    def state(self, step: int) -> Tensor:
        """The state before `step`; cheap if asked from the last step to the first, as a backward pass does."""
        if self.last._version != self.version:
            raise RuntimeError(
                "the loop's last state was changed in place, but the others are rebuilt from it; clone it first"
            )
        if step > self.at:
            self.rebuilt, self.at = self.last, len(self.written)
        while self.at > step:
            self.at -= 1
            self.rebuilt = self.written[self.at].undo(self.rebuilt)
        return self.rebuilt


@final
class Tape:
    """The chains of one call of a loop. A state that the last step did not write begins a new chain."""

    def __init__(self) -> None:
        self.chain: Chain | None = None

    def instead_of(self, Y: Tensor) -> AbstractContextManager:
        """A context in which saving the state `Y` for the backward pass stores only a promise to rebuild it."""
        # The hooks live as long as the graph, so they may know how to find the state but must not hold it.
        place = _place(Y)
        if self.chain is None or place != _place(self.chain.last):
            self.chain = Chain(Y.detach())
        chain, step = self.chain, len(self.chain.written)
        return saved_tensors_hooks(
            lambda saved: (chain, step) if _place(saved) == place else saved,
            lambda kept: kept if isinstance(kept, Tensor) else kept[0].state(kept[1]),
        )

    def wrote(self, Y: Tensor, Y_next: Tensor, *factors: Tensor) -> None:
        """Record that a step turned `Y` into `Y_next` with the factors `g`, `k` and `w`."""
        assert self.chain is not None
        with torch.no_grad():
            self.chain.append(Y.detach(), Y_next.detach(), *(factor.detach() for factor in factors))


def _place(Y: Tensor) -> tuple:
    return Y.data_ptr(), Y.shape, Y.stride()


def _largest(Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T r"]:
    """The largest absolute number of each stream."""
    return torch.linalg.vector_norm(Y, torch.inf, dim=-1)
