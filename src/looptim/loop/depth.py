"""How deep a call of a loop goes: how many steps it runs, and which tokens take each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..base.numerics import wide
from .rules import Carry, Rule, form, memory_for

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from .loop import Loop
    from .transition import Record


class Depth(ABC):
    """A policy: how many steps a call runs at most, and who takes them. It remembers nothing between calls.

    A token that takes no step keeps its state and all that its rule carries: sequences may begin late, and tokens
    leave early.
    """

    needs_record: ClassVar[bool] = False
    """Whether `live` looks at records; without it the loop runs its transitions' compiled forms, which make none."""

    @abstractmethod
    def count_steps(self, loop: Loop, batch: int) -> int:
        """How many steps the loop runs at most for `batch` sequences; a ValueError where it cannot."""

    @abstractmethod
    def live(
        self, step: int, total: int, last: Bool[Tensor, "B ..."] | bool | None, record: Record | None
    ) -> Bool[Tensor, "B ..."] | bool:
        """Who takes `step` of `total`: a mask of sequences (B,) or of tokens (B, T), or True for all.

        False ends the loop before the step. `last` is the answer for the step before and `record`, for a policy that
        needs it, what that step computed; both are None before the first.
        """


@final
@dataclass(frozen=True)
class Fixed(Depth):
    """Every token takes `steps` steps. A loop with loop-specific transitions runs its own number only.

    >>> import looptim as lo
    >>> loop = lo.build("vanilla", width=8, steps=3)
    >>> loop(torch.ones(1, 2, 8), lambda o: 2 * o, depth=Fixed(5))[0, 0, 0].item()
    32.0
    """

    steps: int

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be a whole number of at least 1, got {self.steps!r}")

    def count_steps(self, loop: Loop, batch: int) -> int:
        return len(loop.schedule(self.steps))

    def live(self, step: int, total: int, last: Tensor | bool | None, record: Record | None) -> bool:
        return True


@final
@dataclass(frozen=True, eq=False)
class PerSequence(Depth):
    """Every sequence takes its own number of steps, in a loop whose transition is shared by all steps.

    All end together, after the largest of `counts` or after `total`; a sequence with fewer steps waits at its start.

    >>> import looptim as lo
    >>> loop = lo.build("vanilla", width=8, steps=3)
    >>> loop(torch.ones(2, 1, 8), lambda o: 2 * o, depth=PerSequence([1, 4]))[:, 0, 0].tolist()
    [2.0, 16.0]
    """

    counts: Int[Tensor, " B"] | Sequence[int]
    total: int | None = None
    longest: int = field(init=False)
    """The steps a call runs, found here, since a compiled loop could not look into `counts`."""

    def __post_init__(self) -> None:
        counts = torch.as_tensor(self.counts)
        whole = not (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool)
        if counts.dim() != 1 or not len(counts) or not whole or not (counts >= 1).all():
            raise ValueError(f"counts must be whole numbers of at least 1, one per sequence, got {self.counts}")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "longest", max(int(counts.max()), self.total or 0))

    def count_steps(self, loop: Loop, batch: int) -> int:
        if not loop.shared:
            raise ValueError(
                f"{loop.name} has loop-specific parameters and cannot run as many steps as a sequence asks"
            )
        if len(self.counts) != batch:
            raise ValueError(f"counts has {len(self.counts)} numbers of steps, but the batch has {batch} sequences")
        return self.longest

    def live(self, step: int, total: int, last: Tensor | bool | None, record: Record | None) -> Tensor:
        assert isinstance(self.counts, Tensor)
        return self.counts >= total - step


def merge(
    live: Bool[Tensor, "B ..."], now: tuple[Tensor, Carry], before: tuple[Tensor, Carry], rule: Rule
) -> tuple[Tensor, Carry]:
    """The new state and carry of the tokens that took a step of `rule`, those of before for the others."""
    (Y, carry), (Y_before, carry_before) = now, before
    # Where the step before was another rule's, a token that has not met this one is where it begins.
    memory, lam = memory_for(rule, Y_before, carry_before), carry_before.lam
    shapes = [leaf.shape for leaf in pytree.tree_leaves(carry.memory) if isinstance(leaf, Tensor) and leaf.dim()]
    if form(memory) != form(carry.memory) or any(shape[: live.dim()] != Y.shape[: live.dim()] for shape in shapes):
        raise ValueError(
            f"the memory of {type(rule).__name__} cannot wait for a sequence or a token: `init` must make it in the "
            f"form it has after a step, and the first axes of its tensors must be those of the state, (B, T)"
        )
    if form(lam) != form(carry.lam):
        # Before the first step there is no decay, and so none that is a matrix.
        lam = pytree.tree_map(torch.zeros_like, carry.lam)
    mask = live.reshape(live.shape + (1,) * (4 - live.dim()))

    def pick(mask: Tensor, new: Any, old: Any) -> Any:
        return pytree.tree_map(lambda n, o: _where(mask, n, o, like=Y), new, old)

    # Step sizes and decays broadcast against the state from the right, memories begin like it on the left.
    carry = Carry(pick(mask, carry.eta, carry_before.eta), pick(mask, carry.lam, lam), pick(live, carry.memory, memory))
    return pick(mask, Y, Y_before), carry


def _where(mask: Bool[Tensor, "B ..."], new: Any, old: Any, *, like: Tensor) -> Any:
    """`torch.where` for tensors and numbers; a number that differs becomes one per row of the mask."""
    if not isinstance(new, Tensor):
        if not isinstance(old, Tensor) and new == old:
            return new
        new = torch.tensor(new, dtype=wide(like).dtype, device=like.device)
    return torch.where(mask.reshape(mask.shape + (1,) * ((new.dim() or 4) - mask.dim())), new, old)
