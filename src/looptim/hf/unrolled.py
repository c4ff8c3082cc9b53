"""The layers of a foreign decoder in the order they run, some of them looped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..config import Segment
from ..loop import Depth, Loop
from ..loop.depth import Fixed
from .held import HeldCache


class Twin:
    """What makes a module of some class the double of another: it has no weights, and answers for its owner.

    Whatever is asked of it is looked up in the owner, at that moment: weights that were moved, layers that PEFT
    exchanged. Only its children that are twins themselves, hooks, and `layer_idx` are its own.
    """

    def __getattr__(self, name: str) -> Any:
        children = self.__dict__.get("_modules", {})
        if name in children:
            return children[name]
        if "owner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["owner"], name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Its class is created at run time, so pickle would not find it.
        return make_twin, (self.__dict__["owner"], self.layer_idx)


@functools.cache
def _twin_class(kind: type[nn.Module]) -> type[nn.Module]:
    # transformers also finds layers by the name of their class.
    return type(kind.__name__, (Twin, kind), {"__module__": kind.__module__})


def make_twin(owner: nn.Module, layer_idx: int) -> nn.Module:
    """A double of a layer or of a part of it, with its own place in the KV cache."""
    kind = _twin_class(type(owner))
    twin = kind.__new__(kind)
    nn.Module.__init__(twin)
    # Registered as a child, the owner would add its weights a second time.
    twin.__dict__["owner"] = owner
    # An engine may have replaced the owner's forward; the class keeps the one that engines read.
    twin.__dict__["forward"] = functools.partial(_forward, owner, twin)
    twin.layer_idx = cast(Any, layer_idx)
    twin.training = owner.training
    if "gradient_checkpointing" in owner.__dict__:
        # The class has one of its own, so that it would not be looked up in the owner.
        twin.gradient_checkpointing = owner.gradient_checkpointing
    for name, child in owner.named_children():
        if any(has_place(part) for part in child.modules()):
            twin._modules[name] = make_twin(child, layer_idx)
    return twin


def _forward(owner: nn.Module, twin: nn.Module, *given: Any, **named: Any) -> Any:
    """The owner's forward, run by its twin."""
    return cast(Any, owner.forward).__func__(twin, *given, **named)


def has_place(module: nn.Module) -> bool:
    """Whether a module has its own place in the KV cache."""
    return isinstance(module.__dict__.get("layer_idx"), int)


class UnrolledLayers(nn.Module):
    """What stands where a decoder keeps the list of its layers, and is run through in its place.

    The children `0`, `1`, ... are the distinct layers under their old names, `loops` the transitions, and `visits`
    holds a twin for every time a layer runs again. The decoder calls one thing per unrolled layer and hands it the
    mask and the positions of its kind: all layers of a loop but the last keep what they were handed, and the last
    one runs the loop.
    """

    def __init__(self, layers: Sequence[nn.Module], loops: Sequence[Loop], segments: Sequence[Segment]):
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)
        self.loops = nn.ModuleList(loops)
        self.visits = nn.ModuleList()
        self.decode: Callable[[Tensor], Tensor] | None = None
        """From what a loop returns to logits, for exits that look at predictions."""
        self.depths: list[Tensor] = []
        """How many steps the tokens of the running call took in each loop, where they may leave."""
        self.unroll(segments)

    def unroll(self, segments: Sequence[Segment], depth: Depth | None = None, *, grad_steps: int | None = None) -> None:
        """Run the layers as `segments` say from now on, every loop as deep as `depth` says."""
        self.visits = nn.ModuleList()
        self.depth, self.grad_steps = depth, grad_steps
        self.plan: list[tuple[Loop | None, list[list[nn.Module]]]] = []
        loops = iter(cast("list[Loop]", list(self.loops)))
        first = place = 0
        for blocks, count in segments:
            rows = []
            for step in range(count or 1):
                row = []
                for owner in (self.get_submodule(str(first + block)) for block in range(blocks)):
                    row.append(_place(owner, place) if step == 0 else make_twin(owner, place).train(self.training))
                    place += 1
                if step:
                    self.visits.extend(row)
                rows.append(row)
            loop = None if count is None else next(loops)
            if loop is not None and not (depth is not None and depth.leaves):
                # A transition that is not shared refuses any number of loops but its own.
                loop.schedule(count)
            self.plan.append((loop, rows))
            first += blocks

    @property
    def flat(self) -> list[nn.Module]:
        """Every unrolled layer."""
        return [layer for _, rows in self.plan for row in rows for layer in row]

    def __len__(self) -> int:
        return sum(len(row) for _, rows in self.plan for row in rows)

    def __getitem__(self, index: int | slice) -> Any:
        """A layer, or the things to be called for a part of them."""
        return self.flat[index] if isinstance(index, int) else list(self)[index]

    def __iter__(self) -> Iterator[Visit]:
        """The list a decoder calls, one entry per unrolled layer; it is created anew for every forward pass."""
        if self.depth is not None and self.depth.leaves:
            self.depths = []
        return iter([visit for loop, rows in self.plan for visit in self._visits(loop, rows)])

    def _visits(self, loop: Loop | None, rows: list[list[nn.Module]]) -> list[Visit]:
        if loop is None:
            return [Visit(layer, layer) for row in rows for layer in row]
        layers = [layer for row in rows for layer in row]
        calls: list[Call] = []
        *others, last = [Visit(layer, functools.partial(_keep, calls, layer)) for layer in layers]
        return [*others, Visit(last.layer, functools.partial(self._loop, loop, len(rows), calls, last.layer))]

    def _loop(
        self, loop: Loop, steps: int, calls: list[Call], last: nn.Module, h: Tensor, *given: Any, **named: Any
    ) -> Tensor:
        """Run a loop on what its layers received."""
        _keep(calls, last, h, *given, **named)
        per_step = len(calls) // steps
        depth = self.depth or Fixed(steps)
        if not depth.leaves:
            stacks = [functools.partial(_run, calls[i : i + per_step]) for i in range(0, len(calls), per_step)]
            return cast(Tensor, loop(h, stacks, depth=depth, grad_steps=self.grad_steps))
        cache = _cache_of(calls)
        places = [_place_of(call.layer) for call in calls]
        if depth.by_place:
            # Layers before the loop have entered the tokens of this call already.
            depth = depth.part(0 if cache is None else int(cache.get_seq_length(places[0])), h.shape[1])
        walk = loop.begin(h, depth, decode=self.decode)
        held = HeldCache(cache, walk, {place: i % per_step for i, place in enumerate(places)})
        calls = [call._replace(named=call.named | {"past_key_values": held}) for call in calls]
        stacks = [functools.partial(_run, calls[i : i + per_step]) for i in range(0, len(calls), per_step)]
        h, state = loop(h, stacks, depth=walk, return_state=True)
        held.skip(places[per_step * len(state.live) :])
        self.depths.append(state.depth)
        return h


class Call(NamedTuple):
    """What a layer received besides the hidden states."""

    layer: nn.Module
    given: tuple[Any, ...]
    named: dict[str, Any]


class Visit:
    """One unrolled layer in a running forward: what is called for it, and its attributes."""

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor]):
        self.layer = layer
        self.call = call

    def __call__(self, h: Tensor, *given: Any, **named: Any) -> Tensor:
        return self.call(h, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name == "layer":
            raise AttributeError(name)
        return getattr(self.layer, name)


def _cache_of(calls: list[Call]) -> Any:
    """The cache of a call that tokens may leave; a ValueError where keys and values cannot be held."""
    for call in calls:
        if "past_key_values" not in call.named or call.named.get("cache") is not None:
            raise ValueError(
                "tokens leave a loop one by one only where layers are handed a cache of transformers; generate without "
                "continuous batching, or set a depth that is the same for all tokens"
            )
        if torch.is_grad_enabled() and call.layer.training and getattr(call.layer, "gradient_checkpointing", False):
            raise ValueError(
                "gradient checkpointing hides the cache, at which tokens that leave are held; call "
                "gradient_checkpointing_disable()"
            )
    return calls[0].named["past_key_values"]


def _place_of(layer: nn.Module) -> int:
    return next(cast(int, part.layer_idx) for part in layer.modules() if has_place(part))


def _keep(calls: list[Call], layer: nn.Module, h: Tensor, *given: Any, **named: Any) -> Tensor:
    """Keep what a layer was handed for the loop that will run it, and pass the hidden states on."""
    # A decoder whose layers return tuples mistook a part of the hidden states for the whole.
    _check_hidden(layer, h)
    calls.append(Call(layer, given, named))
    return h


def _run(calls: Sequence[Call], h: Tensor) -> Tensor:
    """Run some layers in order."""
    for layer, given, named in calls:
        h = layer(h, *given, **named)
        _check_hidden(layer, h)
    return h


def _check_hidden(layer: nn.Module, h: Any) -> None:
    if not isinstance(h, Tensor) or h.dim() != 3:
        raise ValueError(
            f"{type(layer).__name__} does not return its hidden states alone, which a loop needs; this architecture "
            "cannot be looped"
        )


def _place(layer: nn.Module, place: int) -> nn.Module:
    """The layer itself, at a given place in the KV cache."""
    for part in layer.modules():
        if has_place(part):
            part.layer_idx = cast(Any, place)
    return layer
