"""Loops around the layers of a decoder that somebody else wrote and trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel

from ..base.code import allow
from ..base.files import check_writable, whole_folder, write_whole
from ..config import Segment, parse_layout
from ..loading import no_progress_bar
from ..loop.registry import check_options
from ..training.gate import check_loop, small_copy
from .card import write_looped_card
from .decoder import LoopedDecoder, LoopedDecoderConfig, build_loop, causal_class, find_layers, install
from .model import LoopedPreTrainedModel
from .opening import open_config, open_folder
from .starts import near_base
from .unrolled import has_place

ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that pass nothing between tokens but keys and values."""


def loop_model(model: PreTrainedModel, layout: str, preset: str = "operloop", **options: Any) -> PreTrainedModel:
    """The decoder `model` of transformers with some of its layers looped: a new model that shares all its weights.

    `layout` says which layers, in the paper's notation: `"10-4x2-16"` runs layers 10 to 13 of 30 twice. `preset` and
    `options` are those of `build`; initial values that are not given are such that the model begins near its base
    (`hf.starts`). The code of the architecture stays as it is; only the list of its layers is exchanged. The
    transition's weights are drawn from torch's global generator. One that sees later tokens, or is no gradient step of
    what it says, is refused.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    >>> base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes))
    >>> loop_model(base, "1-2x3-1", "operloop").config.num_hidden_layers
    8
    """
    allow(preset)
    segments = _check(model, layout, preset)
    _check_ties(model, segments)
    loops = max(segment.loops or 1 for segment in segments)
    options = near_base(preset, loops, options)
    config = LoopedDecoderConfig.of(model.config, layout=layout, preset=preset, options=options)
    for steps in sorted({segment.loops for segment in segments if segment.loops is not None}):
        check_loop(small_copy(config.hidden_size, lambda width, steps=steps: build_loop(config, steps, width)))
    # Every module is copied, so that the base stays as it is, but the tensors are shared.
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    looped = copy.deepcopy(model, tensors)
    looped.__class__ = causal_class(config)
    install(looped, config)
    _try(looped)
    return looped


@torch.no_grad()
def _try(looped: PreTrainedModel) -> None:
    """Run one token, since only a call shows whether layers return what a loop needs."""
    if looped.device.type == "meta":
        return
    training = looped.training
    looped.eval()(input_ids=torch.zeros(1, 1, dtype=torch.long, device=looped.device), use_cache=False)
    looped.train(training)


def loop_folder(
    folder: str | Path,
    out: str | Path,
    *,
    layout: str,
    preset: str = "operloop",
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Loop the decoder in a folder, and write it with its tokenizer to the folder `out`."""
    folder, out, options = Path(folder), Path(out), options or {}
    config = open_config(folder)
    if out.exists():
        raise ValueError(f"{out} exists; give a new folder")
    check_writable(out)
    # What is wrong with the request is said before the weights are read.
    with torch.device("meta"):
        _check(AutoModelForCausalLM.from_config(config), layout, preset)
    check_options(preset, options)
    looped = loop_model(open_folder(folder), layout, preset, **options)
    with no_progress_bar(), whole_folder(out) as aside:
        looped.save_pretrained(aside)
        write_whole(aside / "README.md", write_looped_card(looped))
        if (folder / "tokenizer_config.json").is_file():
            AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(aside)
    return out


def _check(model: PreTrainedModel, layout: str, preset: str) -> tuple[Segment, ...]:
    """The layout, parsed; a ValueError that says why where a model cannot be looped by it."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"loop_model takes a model of transformers, got {type(model).__name__}")
    name = type(model).__name__
    if isinstance(model, LoopedDecoder | LoopedPreTrainedModel):
        raise ValueError(f"{name} is looped already; loop the model it came from")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder and a decoder, and only decoders can be looped")
    if model.config.sub_configs:
        raise ValueError(f"{name} has parts beside its decoder; loop the causal language model inside of it")
    if model.base_model is model or not model.can_generate():
        raise ValueError(f"{name} has no head; load it with AutoModelForCausalLM")
    kinds = set(getattr(model.config, "layer_types", None) or []) - ATTENTION_TYPES
    if model._is_stateful or kinds:
        what = ", ".join(sorted(kinds)) or "a state"
        raise ValueError(f"{name} has recurrent layers ({what}), whose state a second visit would overwrite")
    if getattr(model.config, "num_kv_shared_layers", None):
        raise ValueError(f"{name} has layers that attend to the keys of others, and no loop can run these apart")
    segments = parse_layout(layout)
    if all(segment.loops is None for segment in segments) or preset == "none":
        raise ValueError(f"layout {layout!r} with preset {preset!r} loops nothing; loop some layers, as in '4-2x3-4'")
    layers, given = _layers(model), sum(segment.blocks for segment in segments)
    if given != len(layers):
        raise ValueError(f"layout {layout!r} has {given} layers, but {name} has {len(layers)}; the numbers must add up")
    for index, layer in enumerate(layers):
        if not any(has_place(part) for part in layer.modules()):
            raise ValueError(
                f"layer {index} of {name} has no layer_idx, its place in the KV cache; it cannot be looped"
            )
    return segments


def _check_ties(model: PreTrainedModel, segments: tuple[Segment, ...]) -> None:
    """Raise a ValueError if layers share weights and a loop would run only some of them."""
    layers, first = _layers(model), 0
    for blocks, loops in segments:
        window = range(first, first + blocks)
        first += blocks
        inside = {id(weight): index for index in window for weight in layers[index].parameters()}
        for index, layer in enumerate(layers):
            tied = next((inside[id(weight)] for weight in layer.parameters() if id(weight) in inside), None)
            if loops is not None and index not in window and tied is not None:
                raise ValueError(
                    f"layers {tied} and {index} of {type(model).__name__} are tied, and the loop over {window.start} "
                    f"to {window.stop - 1} would cut them apart; loop both, or neither"
                )


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    body, name = find_layers(model)
    return list(body.get_submodule(name).children())
