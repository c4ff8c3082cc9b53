"""Training a decoder that is there already: the table `pretrained` of a recipe, and what the model's folder tells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from .strict import Strict


class PretrainedConfig(Strict):
    """A decoder of transformers to be looped as `model.layout` and `loop` say, and which of its weights are trained."""

    folder: str | None = Field(None, description="Folder of a decoder saved by transformers, or of a looped one.")
    weights: Literal["transition", "lora", "all"] = Field(
        "all", description="Which weights are trained; lora: the transition and low-rank adapters of the decoder."
    )
    rank: int = Field(8, ge=1, description="Rank of the adapters.")
    targets: tuple[str, ...] = Field((), description="Names of the linear layers that get adapters. Default: all.")
    distill: float = Field(0.0, ge=0, le=1, description="Share of the loss that is the distance from the base.")
    temperature: float = Field(1.0, gt=0, description="Temperature at which distillation compares predictions.")


SHAPE = {
    "width": ("hidden_size",),
    "vocab_size": ("vocab_size",),
    "max_length": ("max_position_embeddings",),
    "tied": ("tie_word_embeddings",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim",),
    "window": ("sliding_window",),
    "dense_hidden": ("intermediate_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_hidden": ("moe_intermediate_size", "intermediate_size"),
    "norm_eps": ("rms_norm_eps",),
}
"""Fields of `ModelConfig`, and what a config.json calls them; the first that is there counts."""


def shape_of(folder: str | Path) -> dict[str, Any]:
    """The table `model` of a recipe for the decoder in a folder, as far as its config.json tells.

    It describes the decoder for those who count, plan and report; the decoder itself is built by transformers.
    """
    path = Path(folder).expanduser() / "config.json"
    try:
        return shape(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(
            f"pretrained.folder {str(folder)!r} has no config.json ({error.strerror}); give the folder of a decoder "
            "as transformers saves it"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not the config of a decoder of transformers ({error!r})") from None


def shape(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same for what stands in a config.json."""
    # What stands on unrolled layers is not what the decoder was built with.
    given = {**given, **given.get("distinct", {})}
    layers, width = int(given["num_hidden_layers"]), int(given["hidden_size"])
    found = {
        name: next((given[word] for word in words if given.get(word) is not None), None)
        for name, words in SHAPE.items()
    }
    known = {name: value for name, value in found.items() if value is not None}
    known.setdefault("head_dim", width // known.get("heads", 1))
    rotary = known["head_dim"] // 2 * 2
    kinds = given.get("layer_types") or ["sliding_attention" if given.get("sliding_window") else "full_attention"]
    known |= {"sliding_rotary": rotary, "full_rotary": rotary}
    known["pattern"] = "".join("S" if kind == "sliding_attention" else "F" for kind in kinds)
    if "experts" in known:
        known["dense_layers"] = int(given.get("first_k_dense_replace") or 0)
        known["shared_hidden"] = max(1, known["expert_hidden"] * int(given.get("n_shared_experts") or 0))
    else:
        known["dense_layers"] = layers
    return {"layout": str(layers), **known, **{name: given[name] for name in ("layout", "loop") if name in given}}
