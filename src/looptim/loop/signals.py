"""Signals that a token has looped enough: one number per token after every step, small once it has settled."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.choices import choose
from ..base.numerics import floored_norm, wide
from .transition import Record, Transition

if TYPE_CHECKING:
    from jaxtyping import Float


class Seen(NamedTuple):
    """What a signal may look at after a step: the step, its record, and what could be read out now."""

    step: int
    """The number of steps taken so far, from 1."""
    transition: Transition
    record: Record
    hidden: Tensor | None
    """The read-out of the state, (B, T, d), for a signal that asks for it."""
    logits: Tensor | None
    """The prediction the model would make now, (B, T, vocabulary), for a signal that asks for it."""


class Signal(nn.Module):
    """A measure of how unsettled each token is. A token leaves when it is below the threshold of its `Exit`.

    >>> class Size(Signal):
    ...     '''The size of the write, relative to nothing.'''
    ...     def forward(self, seen, memory):
    ...         return seen.record.g.norm(dim=-1), None
    >>> import looptim as lo
    >>> loop = lo.build("operloop", width=8, steps=3)
    >>> loop(torch.ones(1, 2, 8), torch.tanh, depth=lo.depth.Exit(Size(), 0.1)).shape
    torch.Size([1, 2, 8])
    """

    asks: Literal["record", "hidden", "logits", "coda"] = "record"
    """The most expensive thing it looks at: predictions need a model with a head, and `coda` has them go through it."""

    @abstractmethod
    def forward(self, seen: Seen, memory: Any) -> tuple[Float[Tensor, "B T"], Any]:
        """One number per token, and its memory for the next step: None, or tensors whose first axes are (B, T)."""

    @property
    def name(self) -> str:
        """The signal's name in tables."""
        return type(self).__name__.lower()


@final
class Residual(Signal):
    """The local objective, relative: `|t - o| / |t|` for delta objectives, `1 - cos(t, o)` for inner products.

    It is known before the write, and needs neither read-out nor head.

    >>> import looptim as lo
    >>> lo.objectives.Delta().residual(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])).round(decimals=4)
    tensor(0.1715)
    """

    def forward(self, seen: Seen, memory: Any) -> tuple[Tensor, None]:
        return seen.transition.objective.residual(seen.record.o, seen.record.t), None


@final
class Change(Signal):
    """`|Y_l - Y_{l-1}| / |Y_l|`, Huginn's latent criterion."""

    def forward(self, seen: Seen, memory: Any) -> tuple[Tensor, None]:
        before, after = wide(seen.record.ctx.Y), wide(seen.record.Y)
        return _relative(after - before, after), None


@final
class Acceleration(Signal):
    """`|D_l - D_{l-1}| / |Y_l|` with `D_l = Y_l - Y_{l-1}`, the larger of two successive steps' (after 2509.23314)."""

    def forward(self, seen: Seen, memory: Any) -> tuple[Tensor, Any]:
        after = wide(seen.record.Y)
        move = after - wide(seen.record.ctx.Y)
        never = _none_yet(move)
        if memory is None:
            return never, (move, never)
        last_move, last = memory
        now = _relative(move - last_move, after)
        return torch.maximum(now, last), (move, now)


class Predicting(Signal):
    """A signal that looks at predictions, read by norm and head alone or, dearer and as trained, through the coda."""

    def __init__(self, *, coda: bool = False):
        super().__init__()
        self.asks = "coda" if coda else "logits"

    @property
    def name(self) -> str:
        return super().name + ("_coda" if self.asks == "coda" else "")


@final
class KL(Predicting):
    """`KL(p_l | p_{l-1})` between the predictions after two successive steps, Huginn's criterion."""

    def forward(self, seen: Seen, memory: Any) -> tuple[Tensor, Tensor]:
        assert seen.logits is not None
        log_p = seen.logits.log_softmax(-1)
        if memory is None:
            return _none_yet(log_p.unsqueeze(-1)), log_p
        # Rounding makes a little less than nothing of it where nothing has changed.
        return (log_p.exp() * (log_p - memory)).sum(-1).clamp_min(0), log_p


@final
class Entropy(Predicting):
    """`-sum p log p` of the prediction, in nats."""

    def forward(self, seen: Seen, memory: Any) -> tuple[Tensor, None]:
        assert seen.logits is not None
        log_p = seen.logits.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1), None


@final
class Margin(Predicting):
    """`1 - (p_1 - p_2)` for the two likeliest tokens."""

    def forward(self, seen: Seen, memory: Any) -> tuple[Tensor, None]:
        assert seen.logits is not None
        top = seen.logits.softmax(-1).topk(2, dim=-1).values
        return 1 - (top[..., 0] - top[..., 1]), None


@final
class Gate(Signal):
    """The probability `prod_{s <= l} (1 - lam_s)` of not having left yet, `lam = sigmoid(w . norm(h) + b)` (Ouro).

    `w` and `b` are trained after the model, by `looptim.training.exit_gate`.
    """

    asks = "hidden"

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 1)
        # The gate starts such that no token leaves.
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, -3.0)

    def stay(self, hidden: Float[Tensor, "B T d"]) -> Float[Tensor, "B T"]:
        """The logit of `1 - lam`, the probability that the token takes one more step."""
        if hidden.shape[-1] != self.linear.in_features:
            raise ValueError(f"the gate has a width of {self.linear.in_features}, but the model {hidden.shape[-1]}")
        h = wide(hidden)
        h = F.rms_norm(h, h.shape[-1:], eps=1e-6)
        return -F.linear(h, self.linear.weight.to(h.dtype), self.linear.bias.to(h.dtype)).squeeze(-1)

    def forward(self, seen: Seen, memory: Any) -> tuple[Tensor, Tensor]:
        assert seen.hidden is not None
        inside = self.stay(seen.hidden).sigmoid()
        inside = inside if memory is None else inside * memory
        return inside, inside


@final
class Random(Signal):
    """A control: tokens leave after step l with the probability that makes `shares` the shares of depths 1, 2, ...

    Use it with a threshold of 1. It draws from torch's global generator.

    >>> Random([0.5, 0.25, 0.25]).hazard
    [0.5, 0.5, 1.0]
    """

    def __init__(self, shares: Sequence[float]):
        super().__init__()
        left = torch.tensor(shares, dtype=torch.float64)
        if left.dim() != 1 or not len(left) or (left < 0).any() or not left.sum() > 0:
            raise ValueError(f"shares must be those of depths 1, 2, ..., none of them negative, got {list(shares)}")
        still = left.flip(0).cumsum(0).flip(0)
        self.hazard = torch.where(still > 0, left / still, 1.0).tolist()

    def forward(self, seen: Seen, memory: Any) -> tuple[Tensor, None]:
        leaves = self.hazard[min(seen.step, len(self.hazard)) - 1]
        drawn = torch.rand(seen.record.Y.shape[:2], device=seen.record.Y.device)
        return drawn / max(leaves, 1e-12), None


def _relative(move: Float[Tensor, "B T r d"], Y: Float[Tensor, "B T r d"]) -> Float[Tensor, "B T"]:
    """`|move| / |Y|`."""
    return torch.linalg.vector_norm(move, dim=(-2, -1)) / floored_norm(Y, dim=(-2, -1))[..., 0, 0]


def _none_yet(like: Tensor) -> Float[Tensor, "B T"]:
    """A value that only a threshold of infinity exceeds, for a step that has nothing to compare with."""
    return torch.full_like(like[..., 0, 0], torch.finfo(like.dtype).max)


SIGNALS: dict[str, Callable[[], Signal]] = {
    "residual": Residual,
    "change": Change,
    "acceleration": Acceleration,
    "kl": KL,
    "entropy": Entropy,
    "margin": Margin,
    "kl_coda": partial(KL, coda=True),
    "entropy_coda": partial(Entropy, coda=True),
    "margin_coda": partial(Margin, coda=True),
}
"""Signals that need only the model, by name; `Gate`, `Random` and a user's own are passed as objects."""


def find_signal(signal: str | Signal) -> Signal:
    """The signal of a name; a signal is returned as it is."""
    return signal if isinstance(signal, Signal) else choose("signal", signal, SIGNALS)()
