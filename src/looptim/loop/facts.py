"""Records of everything the parts of a loop compute while it runs, and of any state they keep."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..base.source import OURS, scope_of
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


def state_of(module: nn.Module) -> dict[str, Any]:
    """The tensors and attributes of a module's parts and of their classes, and the variables that their code names."""
    torchs_own, found = vars(nn.Module()).keys(), {}
    for part in module.modules():
        kind = type(part)
        owned = {k: v for k, v in vars(part).items() if k not in torchs_own} | part._buffers | part._parameters
        theirs = [cls for cls in kind.__mro__ if not _is_of_library(cls)]
        for cls in reversed(theirs):
            owned = {k: v for k, v in vars(cls).items() if k[:2] != "__"} | owned
        if theirs:
            owned = _named_by(kind.forward) | owned
        found |= {f"{kind.__name__}.{key}": _frozen(value) for key, value in owned.items()}
    return found


def _named_by(function: Any) -> dict[str, Any]:
    """The variables from outside that a function uses, and those that the functions among them use."""
    found, functions = {}, [function]
    for each in functions:
        scope = scope_of(each) if isinstance(each, types.FunctionType) and not _is_of_library(each) else {}
        found |= scope
        functions += [value for value in scope.values() if not any(value is seen for seen in functions)]
    return found


def _is_of_library(made: Any) -> bool:
    """Whether a function or class belongs to torch or looptim, which remember nothing."""
    return made.__module__.partition(".")[0] in ("torch", OURS, "builtins")


def _frozen(value: Any, depth: int = 4) -> Any:
    """A copy of plain, possibly nested data; anything else is returned as it is."""
    inner = functools.partial(_frozen, depth=depth - 1)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if depth == 0 or isinstance(value, type | types.ModuleType | types.FunctionType | nn.Module | str):
        return value
    if isinstance(value, Mapping):
        return {key: inner(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [inner(each) for each in value]
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if hasattr(value, "__array__"):
        return inner(value.tolist())
    return [type(value), inner(vars(value))] if hasattr(value, "__dict__") else repr(value)


def find_memory(before: dict[str, Any], after: dict[str, Any]) -> tuple[str | None, float]:
    """The name of something that a forward pass has changed."""
    for name in before.keys() | after.keys():
        if not _is_same(before.get(name), after.get(name)):
            return f"{name}, which remembers earlier calls,", float("inf")
    return None, 0.0


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        # NaN is not equal to itself.
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(each, b[key]) for key, each in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a is b or (type(a) is type(b) and bool(a == b))
