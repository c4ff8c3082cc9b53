"""Does a token's state depend on anything later in its sequence, or on another sequence? Answered by numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .loop import Loop
from .probe import changed_copy, float64_copy, random_input
from .transition import Record, Transition

TOLERANCE = 1e-9
"""Of a change, relative to the values; runs are in float64."""
BATCH, TOKENS = 5, 11
"""Of the probing input; numbers that no other axis is likely to have."""


class Fact(NamedTuple):
    """A tensor that a part made, in the order in which parts work."""

    part: str
    value: Tensor


class _Run(NamedTuple):
    """What all parts gave for an input of so many sequences and tokens."""

    facts: list[Fact]
    batch: int
    length: int

    def select(self, fact: Fact, rows: slice, tokens: slice) -> Tensor:
        """The rows and tokens of a tensor that has such axes; of one that is the same for all of them, everything."""
        value = fact.value
        if value.shape[:1] != (self.batch,):
            return value
        return value[rows, tokens] if value.shape[1:2] == (self.length,) else value[rows]


def check_causality(module: nn.Module, *, vocab_size: int | None = None) -> float:
    """Check that no token sees a later one of its sequence, nor another sequence, or raise and name the part that does.

    Later tokens are changed, then left out, then other sequences are changed, then left out; everything that each part
    gave at the earlier tokens is compared: features, bias, read, target, objective, write, step size, decay, memory,
    state and read-out. This is done in float64, in training and in eval mode, at the own parameters and at randomly
    changed ones. `module` is a `Loop`, or a model that contains some, takes tokens (B, T) and has a `config` or is
    given a `vocab_size`; a model is run at its own parameters. Returns the largest relative change, which is rounding.

    >>> import looptim as lo
    >>> lo.check_causality(lo.build("operloop", width=8, steps=3)) < 1e-9
    True
    """
    found, worst = find_leak(module, vocab_size=vocab_size)
    if found is not None:
        raise ValueError(found)
    return worst


def find_leak(module: nn.Module, *, vocab_size: int | None = None) -> tuple[str | None, float]:
    """The sentence of `check_causality` about the first leak, or None, and the largest relative change."""
    worst = 0.0
    for name, twin, make_input in _twins(module, vocab_size):
        for training in (False, True):
            twin.train(training)
            for what, same, compare in _comparisons(make_input(), training):
                part, change = compare(lambda given, twin=twin: _facts_of(twin, given))
                if part is not None:
                    return f"{name} {what}: {part} gives {same} other values (by {change:.2g}, relative)", change
                worst = max(worst, change)
    return None, worst


def mixes_tokens(loop: Loop) -> bool:
    """Whether a token reads what an earlier one has in the loop, which no KV cache holds.

    Found by changing the first token, at the own and at changed parameters; on the meta device, where there are no
    values to change, by what the parts say of themselves.

    >>> import looptim as lo
    >>> mixes_tokens(lo.build("full_bandwidth", width=8, steps=2, token_shift=True))
    True
    """
    said = any(getattr(part, "mixes_tokens", False) for part in loop.modules())
    if said or any(tensor.is_meta for tensor in (*loop.parameters(), *loop.buffers())):
        return said
    for _, twin, make_input in _twins(loop, None):
        e = make_input()
        first_changed = torch.cat([e[:, :1].flip(-1) + 1, e[:, 1:]], dim=1)
        part, _ = _first_change(_facts_of(twin, e), _facts_of(twin, first_changed), slice(None), slice(1, None))
        if part is not None:
            return True
    return False


def _twins(module: nn.Module, vocab_size: int | None) -> Iterator[tuple[str, nn.Module, Callable[[], Tensor]]]:
    """Copies to run, with what makes their input."""
    if isinstance(module, Loop):
        for twin in (float64_copy(module), changed_copy(module)):
            if twin is not None:
                yield module.name, twin, lambda twin=twin: random_input(twin, BATCH, TOKENS)[0]
        return
    if not any(isinstance(part, Loop) for part in module.modules()):
        raise ValueError(f"check_causality takes a Loop or a model that contains one, got {type(module).__name__}")
    size = vocab_size or getattr(getattr(module, "config", None), "vocab_size", None)
    if size is None:
        raise ValueError(f"{type(module).__name__} has no config that tells its vocab_size; give vocab_size")
    generator = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(module).to("cpu", torch.float64)
    yield type(module).__name__, twin, lambda: torch.randint(size, (BATCH, TOKENS), generator=generator)


def _comparisons(given: Tensor, training: bool) -> Iterator[tuple[str, str, Callable[..., tuple[str | None, float]]]]:
    """What is changed, what must stay the same, and who compares it."""
    other = given.flip(-1) + 1 if given.is_floating_point() else (given + 1) % (given.max() + 1)

    def against(changed: Tensor, rows: slice, tokens: slice):
        return lambda facts: _first_change(facts(given), facts(changed), rows, tokens)

    everything = slice(None)
    for cut in (1, TOKENS // 2, TOKENS - 1):
        before, later = slice(cut), "sees later tokens"
        yield later, "the tokens before", against(torch.cat([given[:, :cut], other[:, cut:]], 1), everything, before)
        # Random draws in training follow the shape of the input, so that there nothing can be left out.
        if not training:
            yield later, "the tokens before", against(given[:, :cut], everything, before)
    mine, across = slice(1), "sees other sequences of its batch"
    yield across, "a sequence", against(torch.cat([given[:1], other[1:]]), mine, everything)
    if not training:
        yield across, "a sequence", against(given[:1], mine, everything)


def _first_change(given: _Run, changed: _Run, rows: slice, tokens: slice) -> tuple[str | None, float]:
    """The first part whose values at these rows and tokens differ, and the largest relative difference up to there."""
    worst = 0.0
    for fact, other in zip(given.facts, changed.facts, strict=True):
        a, b = given.select(fact, rows, tokens), changed.select(other, rows, tokens)
        if a.shape != b.shape:
            return fact.part, float("inf")
        change = 0.0 if torch.equal(a, b) else ((a - b).norm() / a.norm().clamp_min(1e-300)).item()
        worst = max(worst, change)
        if not change <= TOLERANCE:
            return fact.part, change
    return None, worst


def _facts_of(module: nn.Module, given: Tensor) -> _Run:
    """Everything that the parts give for an input, in order."""
    facts: list[Fact] = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _observed(module, facts):
        torch.manual_seed(0)
        if isinstance(module, Loop):
            facts.append(Fact("the read-out", module(given, random_input(module)[1])))
        else:
            output = module(given)
            facts.append(Fact("a block or the head", output if isinstance(output, Tensor) else output.logits))
    return _Run(facts, given.shape[0], given.shape[1])


@contextmanager
def _observed(module: nn.Module, facts: list[Fact]) -> Iterator[None]:
    """Every loop inside `module` enters its facts while the context is open."""
    alone = isinstance(module, Loop)

    def watch(loop: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        first = True

        def observe(transition: Transition, record: Record) -> None:
            nonlocal first
            if first:
                facts.extend([] if alone else [Fact("a block before the loop", record.ctx.e)])
                facts.append(Fact("the start", record.ctx.Y))
                first = False
            facts.extend(_facts_of_step(transition, record, alone=alone))

        return args, {**kwargs, "observe": observe}

    handles = [m.register_forward_pre_hook(watch, with_kwargs=True) for m in module.modules() if isinstance(m, Loop)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _facts_of_step(transition: Transition, record: Record, *, alone: bool) -> Iterator[Fact]:
    target = "the target" if alone else "a block" if transition.target is None else "a block or the target"
    objective, rule = transition.objective, transition.rule
    written = record.x.write(record.g)
    named: list[tuple[str, Any]] = [
        ("the features", record.ctx.Z),
        (f"the bias of the projection {_name(transition.projection)}", record.b),
        (f"the projection {_name(transition.projection)}", record.o),
        (target, record.t),
        (f"the objective {_name(objective)}", (objective.value(record.o, record.t), record.g)),
        (f"the write map {_name(transition.write or transition.projection)}", written),
        (f"the step {_name(rule.step)}", record.carry.eta),
        (f"the decay {_name(rule.decay)}", record.carry.lam),
        (f"the rule {_name(rule)}", (record.carry.memory, record.Y)),
    ]
    for part, values in named:
        yield from (Fact(part, leaf.double()) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def _name(part: object) -> str:
    return type(part).__name__
