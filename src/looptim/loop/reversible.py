"""States that are rebuilt in the backward instead of kept: a loop's memory then hardly grows with its steps.

A stream's write `Y' = k Y - w g` gives its state back, `Y = (Y' + w g) / k`, and the backward asks for the states from
the last to the first. So of each step `g`, `k` and `w` are kept, which its derivative needs anyway, and of the loop the
last state. Every division by `k` amplifies rounding. While the loop runs forward a bound on the error that each stream
of each token will be rebuilt with is carried along, and where it would exceed `TOLERANCE` that stream is kept.
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
"""The largest error of a rebuilt stream that the bound may allow, relative to the largest number of its token."""


def irreversible_part(transition: Transition) -> str | None:
    """The part for which the states of a transition cannot be rebuilt; None where they can.

    >>> import looptim as lo
    >>> irreversible_part(lo.build("operloop_muon", width=8, steps=2).transitions[0])
    'the direction Momentum of the rule'
    """
    # The fused form is a module that imports this one.
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
    """What rebuilds the state before a step from the one after it."""

    g: Float[Tensor, "B T d"]
    k: Float[Tensor, "B T r"]
    w: Float[Tensor, "B T r"]
    kept: Bool[Tensor, "B T r"]
    """The streams for which the bound was too large."""
    streams: Float[Tensor, "n d"]
    """Those streams as they were."""

    def undo(self, Y: Tensor) -> Tensor:
        """The state before the step."""
        before = torch.addcmul(Y.to(self.k.dtype), self.w.unsqueeze(-1), self.g.unsqueeze(-2)) / self.k.unsqueeze(-1)
        return before.to(Y.dtype).masked_scatter_(self.kept.unsqueeze(-1), self.streams)


@final
class Bound:
    """How wrong the streams of the first state of a chain may be rebuilt, at most, step by step.

    A state `Y` is rebuilt with the error `(error of Y' + rounding) / |k|`, where both directions together round by at
    most `eps (3 |Y'| + 5 |k Y|)`. `error` is the sum over steps of rounding times `amplified`, the product of `1/|k|`.
    """

    def __init__(self, Y: Tensor):
        self.size = _largest(Y)
        self.error = torch.zeros_like(self.size)
        self.amplified = torch.zeros_like(self.size)

    def step(self, k: Float[Tensor, "B T r"], Y: Float[Tensor, "B T r d"]) -> Bool[Tensor, "B T r"]:
        """The streams that have to be kept before a step that gives `Y`; their chain begins again after it."""
        size, k = _largest(Y), k.abs()
        rounding = torch.finfo(Y.dtype).eps * (3 * size + 5 * k * self.size)
        amplified = torch.maximum(self.amplified, 1 / self.size.amax(-1, keepdim=True)) / k
        error = self.error + rounding * amplified
        # A state of zeros, or a gate of exactly one, gives no number that could be compared.
        keep = ~(error <= TOLERANCE)
        self.size = size
        self.error, self.amplified = error.masked_fill(keep, 0), amplified.masked_fill(keep, 0)
        return keep


@final
class Chain:
    """Some steps that follow each other, and the state they end with."""

    def __init__(self, Y: Tensor):
        self.bound = Bound(Y)
        self.written: list[Written] = []
        self.last = self.rebuilt = Y
        self.version = Y._version
        self.at = 0
        """Before which step the state is that was rebuilt last."""

    def append(self, Y: Tensor, Y_next: Tensor, g: Tensor, k: Tensor, w: Tensor) -> None:
        keep = self.bound.step(k, Y_next)
        self.written.append(Written(g, k, w, keep, Y[keep]))
        self.last = self.rebuilt = Y_next
        self.version = Y_next._version
        self.at = len(self.written)

    def state(self, step: int) -> Tensor:
        """The state before `step`; cheap where it is asked for from the last to the first, as a backward does."""
        if self.last._version != self.version:
            raise RuntimeError(
                "the loop's last state was changed in place, but the backward rebuilds the others from it"
            )
        if step > self.at:
            self.rebuilt, self.at = self.last, len(self.written)
        while self.at > step:
            self.at -= 1
            self.rebuilt = self.written[self.at].undo(self.rebuilt)
        return self.rebuilt


@final
class Tape:
    """The chains of one call of a loop. A state that is not what the last step wrote begins a new one."""

    def __init__(self) -> None:
        self.chain: Chain | None = None

    def instead_of(self, Y: Tensor) -> AbstractContextManager:
        """Inside of it the backward is promised the state `Y` without keeping it."""
        # The hooks live as long as the graph: they may know where the state is, but not hold it.
        place = _place(Y)
        if self.chain is None or place != _place(self.chain.last):
            self.chain = Chain(Y.detach())
        chain, step = self.chain, len(self.chain.written)
        return saved_tensors_hooks(
            lambda saved: (chain, step) if _place(saved) == place else saved,
            lambda kept: kept if isinstance(kept, Tensor) else kept[0].state(kept[1]),
        )

    def wrote(self, Y: Tensor, Y_next: Tensor, *factors: Tensor) -> None:
        """A step made `Y_next` of `Y` by the factors `g`, `k` and `w`."""
        assert self.chain is not None
        with torch.no_grad():
            self.chain.append(Y.detach(), Y_next.detach(), *(factor.detach() for factor in factors))


def _place(Y: Tensor) -> tuple:
    return Y.data_ptr(), Y.shape, Y.stride()


def _largest(Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T r"]:
    """The largest number of each stream."""
    return torch.linalg.vector_norm(Y, torch.inf, dim=-1)
