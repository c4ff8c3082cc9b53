"""Opening a folder with a causal model of transformers: it runs no code of the folder, and fetches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from ..loading import no_progress_bar

STEERING = {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}
"""Keys of a config.json that may name code of the hub, which transformers would fetch and run."""
BUILT_IN = {None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"}
"""What may stand there: code of torch and transformers."""


def open_folder(folder: str | Path, **options: Any) -> PreTrainedModel:
    """The model in a folder, in eval mode; `options` are those of `from_pretrained`."""
    config = open_config(folder)
    try:
        with no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:
        # Transformers, safetensors and packages that quantize raise all kinds of errors.
        raise ValueError(f"{folder} does not load in transformers: {_first_line(error)}") from error
    return model.eval()


def open_config(folder: str | Path) -> PreTrainedConfig:
    """The config of a causal model in a folder; a ValueError if there is none, or one that leads elsewhere."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, so it is not a model of transformers; give the folder of one")
    if (folder / "adapter_config.json").exists():
        # Transformers would load the base model that the adapter names, wherever that is.
        raise ValueError(f"{folder} has an adapter beside its model; merge it, or remove adapter_config.json")
    try:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = {key: known[key] for key in STEERING & known.keys() if str(known[key]) not in map(str, BUILT_IN)}
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{folder}/config.json does not load in transformers: {_first_line(error)}") from error
    for key, value in sorted(named.items()):
        raise ValueError(f"{folder}/config.json names code of the hub ({key}: {value!r}); remove {key} from it")
    if config.is_encoder_decoder:
        raise ValueError(
            f"{folder} has a {config.model_type}, an encoder with a decoder, and only decoders can be looped"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"{folder} has a {config.model_type}, which is no causal language model; give the folder of one"
        )
    return config


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
