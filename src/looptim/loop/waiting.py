"""Merging the state and carry of tokens that take a step with those of tokens that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..base.numerics import wide
from .rules import Carry, Rule, form, memory_for

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def take(rows: Int[Tensor, " R"] | None, Y: Tensor, e: Tensor, carry: Carry) -> tuple[Tensor, Tensor, Carry]:
    """What a step of the sequences in `rows` looks at; all that there is where that is None."""
    if rows is None:
        return Y, e, carry

    def of(t: Any, least: int) -> Any:
        return t[rows] if isinstance(t, Tensor) and t.dim() >= least and len(t) == len(Y) else t

    return Y[rows], e[rows], _map_carry(of, carry)


def spread(rows: Int[Tensor, " R"] | None, batch: int, Y: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    """What a step of the sequences in `rows` gave, in its place among `batch` of them; zero elsewhere."""
    if rows is None:
        return Y, carry

    def back(t: Any, least: int) -> Any:
        found = isinstance(t, Tensor) and t.dim() >= least and len(t) == len(rows)
        return t.new_zeros(batch, *t.shape[1:]).index_copy(0, rows, t) if found else t

    return back(Y, 1), _map_carry(back, carry)


def _map_carry(function: Callable[[Any, int], Any], carry: Carry) -> Carry:
    """A carry with `function` applied to its leaves, and to how many axes such a leaf has at least if it has (B, T)."""
    # Step sizes and decays broadcast against the state from the right, memories begin like it on the left.
    least = 4, 4, 1
    return Carry(*(pytree.tree_map(lambda t, n=n: function(t, n), part) for part, n in zip(carry, least, strict=True)))


def merge(
    live: Bool[Tensor, "B ..."], now: tuple[Tensor, Carry], before: tuple[Tensor, Carry], rule: Rule
) -> tuple[Tensor, Carry]:
    """The new state and carry for tokens that took a step of `rule`, and the old ones for all others."""
    (Y, carry), (Y_before, carry_before) = now, before
    # If another rule made the step before, a token that has not met this rule yet starts with a fresh memory.
    memory, lam = memory_for(rule, Y_before, carry_before), carry_before.lam
    shapes = [leaf.shape for leaf in pytree.tree_leaves(carry.memory) if isinstance(leaf, Tensor) and leaf.dim()]
    if form(memory) != form(carry.memory) or any(shape[: live.dim()] != Y.shape[: live.dim()] for shape in shapes):
        raise ValueError(
            f"the memory of {type(rule).__name__} cannot wait for a sequence or a token: `init` must make it in the "
            f"form it has after a step, and the first axes of its tensors must be those of the state, (B, T)"
        )
    if form(lam) != form(carry.lam):
        # Before the first step there is no decay, so there is none that is a matrix.
        lam = pytree.tree_map(torch.zeros_like, carry.lam)
    mask = live.reshape(live.shape + (1,) * (4 - live.dim()))

    def pick(mask: Tensor, new: Any, old: Any) -> Any:
        return pytree.tree_map(lambda n, o: _where(mask, n, o, like=Y), new, old)

    carry = Carry(pick(mask, carry.eta, carry_before.eta), pick(mask, carry.lam, lam), pick(live, carry.memory, memory))
    return pick(mask, Y, Y_before), carry


def _where(mask: Bool[Tensor, "B ..."], new: Any, old: Any, *, like: Tensor) -> Any:
    """`torch.where` for tensors and numbers; a number that differs becomes one number per row of the mask."""
    if not isinstance(new, Tensor):
        if not isinstance(old, Tensor) and new == old:
            return new
        new = torch.tensor(new, dtype=wide(like).dtype, device=like.device)
    return torch.where(mask.reshape(mask.shape + (1,) * ((new.dim() or 4) - mask.dim())), new, old)
