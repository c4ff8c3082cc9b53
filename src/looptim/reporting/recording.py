"""What a looped model does with a text, loop by loop: what it would say, how its state moves, where it looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from ..loop import Loop, Trace, trace
from ..loop.depth import Depth, Fixed
from ..loop.maps import Composed, Map, Streams
from ..loop.transition import Record, Transition
from ..model.attention import Attend, Attention
from ..model.lm import LoopedLM
from ..model.moe import Router, Routing
from .leaving import exits_of, left_by
from .template import rounded

TOP = 10
"""How many of the likeliest tokens are kept."""
SOURCES = 8
"""How many of the tokens that are looked at most are kept."""


Chosen = tuple[Tensor, Tensor]
"""The experts of each token and their weights, (T, top_k)."""


class Quantity(NamedTuple):
    """A number of every token after every step, or one for each of its streams."""

    title: str
    meaning: str
    read: Callable[[Trace, int], Tensor | None]
    """The numbers, (T,) or (T, r), after a step of a trace; step 0 is the start, where many have none."""


def _after(column: Callable[[Trace, int], Tensor | None]) -> Callable[[Trace, int], Tensor | None]:
    """What a step has computed, by the index of the step; a start has computed nothing."""
    return lambda seen, row: column(seen, row - 1) if row else None


def _per_token(value: Tensor, state: Tensor) -> Tensor:
    """A step size or decay as one number per token, or per stream; of a matrix over streams, the diagonal."""
    _, length, streams, _ = state.shape
    if streams > 1 and value.dim() >= 2 and value.shape[-2:] == (streams, streams):
        return value.diagonal(dim1=-2, dim2=-1).expand(1, length, streams)[0]
    value = value.expand(1, length, *value.shape[2:])[0] if value.dim() == 4 else value.expand(length, 1, 1)
    return value.mean(-1).squeeze(-1)


def _stream_weights(map: Map) -> Tensor | None:
    """The row vector of a map over streams; other maps have none."""
    inner = map.inner if isinstance(map, Composed) else map
    return inner.h[0] if isinstance(inner, Streams) else None


def _moved(seen: Trace, step: int) -> Tensor:
    before, after = (state[0].flatten(1).float() for state in seen.state[step : step + 2])
    return (after - before).norm(dim=-1) / before.norm(dim=-1).clamp_min(1e-12)


def _cosine(seen: Trace, row: int) -> Tensor:
    return torch.cosine_similarity(seen.state[row][0].flatten(1).float(), seen.state[-1][0].flatten(1).float(), dim=-1)


QUANTITIES = {
    "objective": Quantity(
        "local objective", "L(o), which the step reduces", _after(lambda seen, i: seen.objective[i][0])
    ),
    "step_size": Quantity(
        "step size", "η, mean over channels", _after(lambda seen, i: _per_token(seen.step_size[i], seen.state[i]))
    ),
    "decay": Quantity("decay", "λ per stream", _after(lambda seen, i: _per_token(seen.decay[i], seen.state[i]))),
    "read": Quantity("read weights", "H per stream", _after(lambda seen, i: _stream_weights(seen.input_map[i]))),
    "write": Quantity("write weights", "x per stream", _after(lambda seen, i: _stream_weights(seen.write_map[i]))),
    "state_norm": Quantity(
        "state norm", "RMS of the state Y", lambda seen, row: seen.state[row][0].float().square().mean((-2, -1)).sqrt()
    ),
    "moved": Quantity("distance moved", "|Y′ − Y| / |Y|", _after(_moved)),
    "cosine": Quantity("cosine to the end", "of this state and the final one", _cosine),
}
"""The optimizer's view of a loop, by the names that the page's data has for it."""


def record(
    model: nn.Module, ids: Sequence[int], *, loops: int | None = None, depth: Depth | None = None
) -> dict[str, Any]:
    """What `model` does with one sequence, as lists for JSON: rows are the loops' states, columns are tokens.

    `lens` is what the model says if its loop ends with the state of a row: the read-out, then all that follows the
    loop, at every token alike. `loops` runs a shared transition another number of times than the layout says. Where a
    `depth` lets tokens leave, `left` is what they really did; everything else is of a run at full depth.
    """
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    inside = [module for module in model.modules() if isinstance(module, Loop)]
    with torch.no_grad(), _ready(model, loops) as logits:
        with ExitStack() as stack:
            steps = [stack.enter_context(_steps(loop)) for loop in inside]
            # A model without a loop is refused by trace itself.
            traces = [stack.enter_context(trace(loop)) for loop in inside or [model]]
            layers = stack.enter_context(_watch(model))
            last = logits(tokens)
        lens = _Lens(last.log_softmax(-1), tokens[0])
        rows = []
        for number, (loop, seen) in enumerate(zip(inside, traces, strict=True)):
            for step, Y in enumerate(seen.state):
                rows.append({"loop": number, "step": step})
                with _ending_with(loop, Y):
                    lens.add(logits(tokens))
        found = list(layers.values()) if isinstance(model, LoopedLM) else _decoder_layers(model, tokens)
        exits = exits_of(model, inside[0], steps[0]) if len(steps) == 1 else []
        left = None if depth is None else left_by(model, tokens, depth)
    return {
        "rows": rows,
        "lens": lens.as_lists(),
        "quantities": _quantities(traces),
        "layers": [layer.as_lists() for layer in found],
        "exits": exits,
        "left": left,
    }


@contextmanager
def _ready(model: nn.Module, loops: int | None) -> Iterator[Callable[[Tensor], Tensor]]:
    """What gives the logits of one sequence, at the depth asked for; the model is left as it was."""
    training = model.training
    model.eval()
    try:
        if isinstance(model, LoopedLM):
            yield lambda tokens: model(tokens, depth=None if loops is None else Fixed(loops))[0].float()
            return
        with _at_depth(cast(Any, model), loops):
            yield lambda tokens: cast(Any, model)(tokens, use_cache=False).logits[0].float()
    finally:
        model.train(training)


@contextmanager
def _at_depth(decoder: Any, loops: int | None) -> Iterator[None]:
    """A looped decoder of transformers whose tokens all run so many loops, or as many as it is set to."""
    depth, grad_steps = decoder.unrolled.depth, decoder.unrolled.grad_steps
    decoder.set_loops(decoder.config.loops if loops is None else loops)
    try:
        yield
    finally:
        decoder.set_depth(depth, grad_steps=grad_steps)


@contextmanager
def _steps(loop: Loop) -> Iterator[list[tuple[Transition, Record]]]:
    """Every step of the loop with all it computed, while the context is open."""
    steps: list[tuple[Transition, Record]] = []

    def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, {**kwargs, "observe": lambda transition, record: steps.append((transition, record))}

    handle = loop.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield steps
    finally:
        handle.remove()


def _decoder_layers(model: nn.Module, tokens: Tensor) -> list[_Layer]:
    """Where the layers of a looped decoder of transformers look, and which experts they choose, at every visit."""
    decoder = cast(Any, model)
    layers: dict[str, _Layer] = {}
    before = decoder.config._attn_implementation
    # Other implementations do not give their weights away.
    decoder.set_attn_implementation("eager")
    try:
        with ExitStack() as stack:
            first, place = 0, "before the loop"
            for loop, rows in decoder.unrolled.plan:
                place = "in the loop" if loop is not None else place
                for number, owner in enumerate(rows[0], first):
                    layer = layers[str(number)] = _Layer(f"layer {number}", place)
                    for visit in (row[number - first] for row in rows):
                        _watch_decoder_layer(stack, visit, layer.attention)
                    _watch_experts(stack, owner, layer.experts)
                first += len(rows[0])
                place = "after the loop" if loop is not None else place
            decoder(tokens, use_cache=False)
    finally:
        decoder.set_attn_implementation(before)
    return list(layers.values())


def _watch_decoder_layer(stack: ExitStack, visit: nn.Module, into: list[Tensor]) -> None:
    """Record what one visit to a layer of transformers looks at: its attention returns the weights of its heads."""

    def keep(_: nn.Module, __: tuple, out: Any) -> None:
        weights = out[1] if isinstance(out, tuple) and len(out) > 1 else None
        if isinstance(weights, Tensor) and weights.dim() == 4:
            into.append(weights[0].float().mean(0))

    # What has a place in the KV cache is an attention, or what stands for one.
    for part in visit.modules():
        if isinstance(getattr(part, "layer_idx", None), int):
            stack.callback(part.register_forward_hook(keep).remove)


def _watch_experts(stack: ExitStack, layer: nn.Module, into: list[Chosen]) -> None:
    """Record what the experts of a layer of transformers are asked: all visits ask the same ones."""

    def keep(_: nn.Module, given: tuple, named: dict[str, Any]) -> None:
        # Nearly every architecture hands its experts the tokens, whom each of them asks, and with what weight.
        _, *asked = (*given, *named.values())
        if len(asked) == 2 and asked[0].shape == asked[1].shape and not asked[0].is_floating_point():
            into.append((asked[0], asked[1].float()))

    for name, part in layer.named_modules():
        if name.rpartition(".")[2] == "experts":
            stack.callback(part.register_forward_pre_hook(keep, with_kwargs=True).remove)


@contextmanager
def _ending_with(loop: Loop, Y: Tensor) -> Iterator[None]:
    """Let the loop return what it would have returned if it had ended with the state `Y`."""
    h = loop.readout(Y)
    handle = loop.register_forward_hook(lambda _, __, out: (h, *out[1:]) if isinstance(out, tuple) else h)
    try:
        yield
    finally:
        handle.remove()


@final
class _Lens:
    """What is kept of the logits of each row."""

    def __init__(self, last: Tensor, tokens: Tensor):
        self.last, self.true = last, tokens[1:]
        self.rows: list[dict[str, Any]] = []
        self.answers: list[Tensor] = []

    def add(self, logits: Tensor) -> None:
        likely = logits.log_softmax(-1)
        top = likely.topk(min(TOP, likely.shape[-1]))
        chance = likely[:-1].gather(-1, self.true.unsqueeze(-1))
        self.answers.append(top.indices[:, 0])
        self.rows.append(
            {
                "top": top.indices.tolist(),
                "probability": rounded(top.values.exp()),
                "rank": [*((likely[:-1] > chance).sum(-1) + 1).tolist(), None],
                "true": [*rounded(chance.squeeze(-1).exp()), None],
                "kl": rounded((self.last.exp() * (self.last - likely)).sum(-1).clamp_min(0)),
            }
        )

    def as_lists(self) -> dict[str, Any]:
        """The rows, and after which of them the answer of each token stays what it is at the end."""
        same = torch.stack(self.answers) == self.answers[-1]
        settled = len(same) - same.flip(0).cummin(0).values.sum(0)
        return {**{key: [row[key] for row in self.rows] for key in self.rows[0]}, "settles": settled.tolist()}


def _quantities(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    found = []
    for key, quantity in QUANTITIES.items():
        values = [quantity.read(seen, row) for seen in traces for row in range(len(seen.state))]
        if any(value is not None for value in values):
            lists = [None if value is None else rounded(value) for value in values]
            found.append({"key": key, "title": quantity.title, "meaning": quantity.meaning, "values": lists})
    return found


@final
class _Layer:
    """What a block did at each of its visits."""

    def __init__(self, name: str, place: str):
        self.name, self.place = name, place
        self.attention: list[Tensor] = []
        self.experts: list[Chosen] = []

    def as_lists(self) -> dict[str, Any]:
        attention, experts = [], []
        for weights in self.attention:
            top = weights.topk(min(SOURCES, weights.shape[-1]))
            attention.append({"source": top.indices.tolist(), "weight": rounded(top.values, 3)})
        for indices, weights in self.experts:
            order = weights.argsort(descending=True)
            chosen, weights = indices.gather(-1, order), weights.gather(-1, order)
            experts.append({"chosen": chosen.tolist(), "weight": rounded(weights, 3)})
        return {"name": self.name, "place": self.place, "attention": attention, "experts": experts}


@contextmanager
def _watch(model: nn.Module) -> Iterator[dict[str, _Layer]]:
    """Record where the blocks look and whom they ask, while the context is open."""
    layers: dict[str, _Layer] = {}
    place = ["before the loop"]

    def layer_of(name: str) -> _Layer:
        return layers.setdefault(name, _Layer(name, place[0]))

    def look(name: str):
        def hook(_: nn.Module, args: tuple) -> tuple:
            hidden, attend, *rest = args
            return hidden, _attend_and_record(attend, layer_of(name).attention), *rest

        return hook

    def ask(name: str):
        def hook(_: nn.Module, __: tuple, routing: Routing) -> None:
            layer_of(name).experts.append((routing.indices, routing.weights))

        return hook

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, Loop):
            handles.append(module.register_forward_pre_hook(lambda *_: place.__setitem__(0, "in the loop")))
            handles.append(module.register_forward_hook(lambda *_: place.__setitem__(0, "after the loop")))
        elif isinstance(module, Attention):
            handles.append(module.register_forward_pre_hook(look(name.removesuffix(".attention"))))
        elif isinstance(module, Router):
            handles.append(module.register_forward_hook(ask(name.removesuffix(".feedforward.router"))))
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


def _attend_and_record(attend: Attend, into: list[Tensor]) -> Attend:
    """`attend`, which also records the mean over heads of its weights: what it gives for values that are unit vectors.

    So a slot's weights are known without knowing its mask.
    """

    def attend_and_record(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        unit = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:3], -1)
        into.append(attend(q, k, unit)[0].float().mean(0))
        return attend(q, k, v)

    return attend_and_record
