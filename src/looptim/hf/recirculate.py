"""Recirculation as published: a frozen decoder that runs its upper layers again on a mixed state, token by token."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import PreTrainedModel

from .decoder import find_layers


class Recirculation(NamedTuple):
    """`d' = (1 - a) d + a |d| s / |s|` with `a = alpha min(t / ramp, 1)` for the token at position t.

    `d` is what enters the layer `destination`, `s` what leaves the deeper layer `source`, both in the first pass.

    Reference: Mozer et al., "Recirculation", 2026.
    """

    destination: int
    source: int
    alpha: float = 0.1
    ramp: int = 10

    def mix(self, d: Tensor, s: Tensor, positions: Tensor) -> Tensor:
        """The state that enters the destination in the second pass."""
        share = self.alpha * (positions / self.ramp).clamp(0, 1)[..., None] if self.ramp else self.alpha
        norm = functools.partial(torch.linalg.vector_norm, dim=-1, keepdim=True)
        mixed = (1 - share) * d.float() + share * norm(d.float()) * s.float() / norm(s.float()).clamp_min(1e-12)
        return mixed.to(d.dtype)


def recirculate(
    model: PreTrainedModel, destination: int, source: int, *, alpha: float = 0.1, ramp: int = 10
) -> PreTrainedModel:
    """The decoder `model` with the policy of `Recirculation`: a new model that shares its weights.

    Every token is run twice. The logits are those of the first pass; the second replaces what it has put into the
    cache, so that later tokens attend to the mixed state from layer `destination` on. Tokens are therefore run one
    after the other, in a prompt too. With `alpha = 0` it is the base.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    >>> model = recirculate(LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes)), 1, 2)
    >>> model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False, eos_token_id=None).shape
    torch.Size([1, 5])
    """
    body, name = find_layers(model)
    layers = len(list(body.get_submodule(name).children()))
    if not 0 <= destination <= source < layers:
        raise ValueError(
            f"destination ({destination}) must not lie behind source ({source}), and both be layers from 0 to "
            f"{layers - 1}"
        )
    if not 0 <= alpha <= 1 or ramp < 0:
        raise ValueError(f"alpha must lie between 0 and 1 and ramp not be negative, got {alpha} and {ramp}")
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twice = copy.deepcopy(model, tensors)
    twice.__class__ = _class_of(type(model))
    cast(Any, twice).recirculation = Recirculation(destination, source, alpha, ramp)
    return twice


@functools.cache
def _class_of(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, functools.partial(base.forward, self), *args, **kwargs)

    # Transformers asks the forward of a model what it takes.
    functools.update_wrapper(forward, base.forward)
    return type(f"Recirculated{base.__name__}", (base,), {"__module__": __name__, "forward": forward})


@torch.no_grad()
def _run(
    model: Any,
    forward: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: DynamicCache | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **others: Any,
) -> Any:
    """The tokens of a call, one after the other, each in two passes."""
    cache = DynamicCache(config=model.config) if past_key_values is None else past_key_values
    if type(cache) is not DynamicCache:
        raise ValueError(f"recirculation replaces entries of a DynamicCache, and was given a {type(cache).__name__}")
    past, length = cache.get_seq_length(), input_ids.shape[1]
    if position_ids is None:
        position_ids = torch.arange(past, past + length, device=input_ids.device).expand(len(input_ids), -1)
        if attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
    rows: list[Tensor] = []
    out: Any = None
    for i in range(length):
        given = {
            "input_ids": input_ids[:, i : i + 1],
            "attention_mask": None if attention_mask is None else attention_mask[:, : past + i + 1],
            "position_ids": position_ids[:, i : i + 1],
            "past_key_values": cache,
            "use_cache": True,
            **others,
        }
        # An update of a dynamic cache makes new tensors, so that the old ones are still there.
        before = [copy.copy(layer) for layer in cache.layers]
        with _watch(model) as seen:
            out = forward(**given)
        rows.append(out.logits)
        cache.layers[:] = before or [type(layer)() for layer in cache.layers]
        mixed = model.recirculation.mix(seen["d"], seen["s"], given["position_ids"])
        with _enter(model, mixed):
            forward(**given)
    logits = torch.cat(rows, 1)
    if labels is not None:
        out.loss = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    out.logits = logits[:, kept]
    out.past_key_values = cache if use_cache is not False else None
    return out


@contextmanager
def _watch(model: Any) -> Iterator[dict[str, Tensor]]:
    """What enters the destination and what leaves the source, while the model runs."""
    seen: dict[str, Tensor] = {}
    destination, source = _ends(model)

    def enters(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen["d"] = given[0]

    def leaves(layer: nn.Module, given: Any, out: Any) -> None:
        seen["s"] = out[0] if isinstance(out, tuple) else out

    handles = [destination.register_forward_pre_hook(enters), source.register_forward_hook(leaves)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _enter(model: Any, state: Tensor) -> Iterator[None]:
    """Another state enters the destination, while the model runs."""
    destination, _ = _ends(model)
    handle = destination.register_forward_pre_hook(lambda layer, given: (state, *given[1:]))
    try:
        yield
    finally:
        handle.remove()


def _ends(model: Any) -> tuple[nn.Module, nn.Module]:
    body, name = find_layers(model)
    layers = list(body.get_submodule(name).children())
    return layers[model.recirculation.destination], layers[model.recirculation.source]
