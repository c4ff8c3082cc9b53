"""The config of a model in the words of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from ..config import ModelConfig
from ..model import Layout
from .opening import STEERING

NAMES = {
    "width": "hidden_size",
    "max_length": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "window": "sliding_window",
    "dense_hidden": "intermediate_size",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_hidden": "moe_intermediate_size",
    "shared_hidden": "shared_expert_intermediate_size",
    "routed_scaling": "routed_scaling_factor",
    "aux_coefficient": "router_aux_loss_coef",
    "init_std": "initializer_range",
    "norm_eps": "rms_norm_eps",
}
"""Fields of `ModelConfig` that go by another name in transformers; `max_length` and `top_k` would steer `generate`."""

DESCRIBED = {
    "loops",
    "code",
    "use_cache",
    "dtype",
    "task_specific_params",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
"""Keys of a config.json that describe a model, besides those of its `ModelConfig`."""
DTYPES = ("float32", "bfloat16", "float16", "float64")

AUTO_CLASSES = {"AutoConfig": "LoopedConfig", "AutoModel": "LoopedModel", "AutoModelForCausalLM": "LoopedForCausalLM"}
SHIM = "modeling_looptim"
SHIM_SOURCE = '''"""The model is defined in looptim, which has to be installed with its extra hf."""

try:
    from looptim.hf import LoopedConfig, LoopedForCausalLM, LoopedModel
except ImportError as error:
    raise ImportError("this model is defined in looptim; install it from its repository, with its extra hf") from error

__all__ = ["LoopedConfig", "LoopedForCausalLM", "LoopedModel"]
'''


class LoopedConfig(PreTrainedConfig):
    """A `ModelConfig` in the words of transformers, and `loops`, how often the looped segments are run.

    `layout` says what weights there are; `loops`, where given, runs a shared transition another number of times.

    >>> LoopedConfig(layout="1-1x3-1", loop={"preset": "vanilla"}, loops=5).num_hidden_layers
    7
    """

    model_type = "looptim"
    through_coda = False
    """Whether an exit reads predictions through the coda, whose visits have places of their own in the KV cache."""
    # This must be a list, since Trainer adds another to it.
    keys_to_ignore_at_inference = ["past_key_values", "aux_loss"]  # noqa: RUF012

    def __init__(self, layout: str = "18", *, loops: int | None = None, use_cache: bool = True, **kwargs: Any):
        for name in sorted(NAMES.keys() & kwargs.keys()):
            raise ValueError(f"{name} goes by {NAMES[name]} in a LoopedConfig; give that")
        given = {name: kwargs.pop(NAMES.get(name, name), None) for name in ModelConfig.model_fields if name != "layout"}
        model = ModelConfig(layout=layout, **{name: value for name, value in given.items() if value is not None})
        for name, value in model.model_dump().items():
            setattr(self, NAMES.get(name, name), value)
        self.loops = loops
        self.use_cache = use_cache
        special = {name: kwargs.pop(name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        super().__init__(**kwargs)
        for name, value in special.items():
            setattr(self, name, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A config as it was saved: attributes with one of our own words, which have no effect, come back as such."""
        ours = {name: value for name, value in config_dict.items() if name in NAMES}
        # A file that says how to attend may name code of the hub, which transformers would fetch and run.
        config = super().from_dict({name: config_dict[name] for name in config_dict.keys() - ours - STEERING}, **kwargs)
        for name, value in ours.items():
            setattr(config[0] if isinstance(config, tuple) else config, name, value)
        return config

    @classmethod
    def from_model_config(cls, config: ModelConfig, **kwargs: Any) -> LoopedConfig:
        """The config of a `LoopedLM`; `kwargs` are those of transformers, such as `eos_token_id`."""
        return cls(**{NAMES.get(name, name): value for name, value in config.model_dump().items()}, **kwargs)

    @classmethod
    def from_file(cls, path: Path) -> LoopedConfig:
        """The config in a file that anybody may have made: what describes the model, and nothing else.

        Other keys are left out, since transformers fetches code that some of them name (`attn_implementation`).
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            kind, dtype = values.get("model_type"), values.get("dtype")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not the config of a model ({error}); export it again") from None
        if kind != cls.model_type:
            raise ValueError(f"{path} is of a model of type {kind!r}, not of one that `looptim export` wrote")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"{path}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        fields = {NAMES.get(name, name) for name in ModelConfig.model_fields} | DESCRIBED
        return cls(**{name: value for name, value in values.items() if name in fields})

    def to_model_config(self) -> ModelConfig:
        """The config of the `LoopedLM` that holds the weights."""
        return ModelConfig(**{name: getattr(self, NAMES.get(name, name)) for name in ModelConfig.model_fields})

    # These are derived and never stored: a config.json's values would be wrong as soon as `loops` is given.

    @property
    def layer_types(self) -> list[str]:
        """The kind of attention of every unrolled layer: the KV cache is laid out by it."""
        config = self.to_model_config()
        config = config if self.loops is None else config.with_loops(self.loops)
        layout = Layout.of(config)
        names = [layer.attention.name for layer in [*layout.layers, *layout.readings(self.through_coda)]]
        # A kind that transformers has no word for is cached whole, and masked by its own window.
        return [name if name == "sliding_attention" else "full_attention" for name in names]

    @layer_types.setter
    def layer_types(self, value: Any) -> None:
        pass

    @property
    def num_hidden_layers(self) -> int:
        """The number of unrolled layers."""
        return len(self.layer_types)

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: Any) -> None:
        pass

    def to_dict(self) -> dict[str, Any]:
        """The fields, what is derived from them for other readers, and where the code is."""
        given = super().to_dict()
        # Exits are not saved.
        given.pop("through_coda", None)
        return given | {
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": self.layer_types,
            "auto_map": {auto: f"{SHIM}.{name}" for auto, name in AUTO_CLASSES.items()},
        }

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Also writes the module that `trust_remote_code=True` imports."""
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / f"{SHIM}.py").write_text(SHIM_SOURCE)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: transformers would copy this file into every saved folder, where the shim is."""
