"""Records of everything the parts of a loop compute while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .directions import Direction
from .loop import Loop
from .rules import Retraction
from .transition import Record, Transition


class Fact(NamedTuple):
    """A tensor that a part computed, in the order in which the parts run."""

    part: str
    value: Tensor


@contextmanager
def observed(module: nn.Module, facts: list[Fact]) -> Iterator[None]:
    """Record the facts of every loop inside `module` while the context is open."""
    alone, inside = isinstance(module, Loop), []

    def watch(loop: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        first = True

        def observe(transition: Transition, record: Record) -> None:
            nonlocal first
            if first:
                facts.extend([] if alone else [Fact("a block before the loop", record.ctx.e)])
                facts.append(Fact("the start", record.ctx.Y))
                first = False
            facts.extend(_facts_of_step(transition, record, inside, alone=alone))
            inside.clear()

        return args, {**kwargs, "observe": observe}

    def watch_inside(part: nn.Module, args: tuple, output: Any) -> None:
        kind = "direction" if isinstance(part, Direction) else "retraction"
        inside.append((f"the {kind} {_name(part)}", output))

    with ExitStack() as hooks:
        for part in module.modules():
            if isinstance(part, Loop):
                hooks.callback(part.register_forward_pre_hook(watch, with_kwargs=True).remove)
            elif isinstance(part, Direction | Retraction):
                hooks.callback(part.register_forward_hook(watch_inside).remove)
        yield


def _facts_of_step(
    transition: Transition, record: Record, inside_rule: Sequence[tuple[str, Any]], *, alone: bool
) -> Iterator[Fact]:
    target = "the target" if alone else "a block" if transition.target is None else "a block or the target"
    objective, rule = transition.objective, transition.rule
    named: list[tuple[str, Any]] = [
        ("the features", record.ctx.Z),
        (f"the bias of the projection {_name(transition.projection)}", record.b),
        (f"the projection {_name(transition.projection)}", record.o),
        (target, record.t),
        (f"the objective {_name(objective)}", (objective.value(record.o, record.t), record.g)),
        (f"the write map {_name(transition.write or transition.projection)}", record.x.write(record.g)),
        (f"the step {_name(rule.step)}", record.carry.eta),
        (f"the decay {_name(rule.decay)}", record.carry.lam),
        *inside_rule,
        (f"the rule {_name(rule)}", (record.carry.memory, record.Y)),
    ]
    for part, values in named:
        leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor | float | int)]
        yield from (Fact(part, torch.as_tensor(leaf).double()) for leaf in leaves)


def _name(part: object) -> str:
    return type(part).__name__
