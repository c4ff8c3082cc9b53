"""Any decoder of transformers with some of its layers looped: its config and its classes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import transformers
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import ModelOutput

from ..config import LoopConfig, Segment, parse_layout
from ..loop import Depth, Loop, mixes_tokens
from ..loop.depth import Fixed, PerSequence, PerToken
from ..loop.registry import build_named, options_of
from .opening import STEERING
from .unrolled import UnrolledLayers


class LoopedDecoderConfig(PreTrainedConfig):
    """The config of a decoder, with `layout`, `loop` and `loops`; a subclass for every config of transformers.

    `num_hidden_layers` and `layer_types` are those of the unrolled layers, which the KV cache is laid out by, and
    follow `loops`; `distinct` has them as the decoder itself was built with.
    """

    model_type = "looptim_decoder"
    has_no_defaults_at_init = True

    def __init__(
        self,
        *,
        layout: str,
        loop: dict[str, Any],
        distinct: dict[str, Any],
        base_model_type: str,
        loops: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs | distinct)
        self.layout = layout
        self.loop = LoopConfig(**loop).model_dump()
        self.distinct = distinct
        self.base_model_type = base_model_type
        self.loops = loops

    @classmethod
    def of(cls, config: PreTrainedConfig, *, layout: str, preset: str, options: dict[str, Any]) -> LoopedDecoderConfig:
        """The config of a decoder once it is looped."""
        given = config.to_dict()
        per_layer = [name for name in given if name.endswith("layer_types") and given[name] is not None]
        distinct = {name: given[name] for name in per_layer} | {"num_hidden_layers": config.num_hidden_layers}
        looped = _config_class(type(config))(
            **{name: value for name, value in given.items() if name not in ("model_type", "architectures")},
            layout=layout,
            loop={"preset": preset, "options": options},
            distinct=distinct,
            base_model_type=config.model_type,
        )
        return cast(LoopedDecoderConfig, looped)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A config of the class that the dict names."""
        kind: Any = _config_class(CONFIG_MAPPING[config_dict["base_model_type"]])
        if cls is not kind:
            return kind.from_dict(config_dict, **kwargs)
        # A file that says how to attend may name code of the hub, which transformers would fetch and run.
        return super().from_dict({name: config_dict[name] for name in config_dict.keys() - STEERING}, **kwargs)

    def to_distinct(self) -> PreTrainedConfig:
        """The config of the decoder without its loops."""
        ours = {"layout", "loop", "loops", "distinct", "base_model_type", "model_type", "architectures"}
        given = {name: value for name, value in self.to_dict().items() if name not in ours}
        config = CONFIG_MAPPING[self.base_model_type](**given | self.distinct)
        config._attn_implementation = self._attn_implementation
        config._experts_implementation = self._experts_implementation
        return config

    @property
    def loops(self) -> int | None:
        """How often the looped segments are run, where it is not what the layout says."""
        return self.__dict__.get("loops")

    @loops.setter
    def loops(self, loops: int | None) -> None:
        if loops is not None:
            Fixed(loops)
        self.__dict__["loops"] = loops
        order = [block for row in _rows(self.segments) for block in row]
        for name, value in self.distinct.items():
            setattr(self, name, [value[block] for block in order] if isinstance(value, list) else len(order))

    @property
    def segments(self) -> list[Segment]:
        """The layout with the loops that are run."""
        segments = parse_layout(self.layout)
        return [s if s.loops is None or self.loops is None else s._replace(loops=self.loops) for s in segments]


def _rows(segments: list[Segment]) -> list[range]:
    """The distinct layers of every row of unrolled ones."""
    rows, first = [], 0
    for blocks, loops in segments:
        rows += [range(first, first + blocks)] * (loops or 1)
        first += blocks
    return rows


class LoopedDecoder:
    """What looped decoders add to their architecture; a mixin that comes before its class."""

    def __init__(self, config: LoopedDecoderConfig):
        super().__init__(config.to_distinct())
        install(cast(PreTrainedModel, self), config)
        cast(PreTrainedModel, self).post_init()

    @property
    def unrolled(self) -> UnrolledLayers:
        """The layers in the order they run."""
        return next(part for part in cast(nn.Module, self).modules() if isinstance(part, UnrolledLayers))

    @property
    def loops(self) -> nn.ModuleList:
        """The loops; `diagnose(model.loops[0])`."""
        return self.unrolled.loops

    def set_loops(self, loops: int | None) -> None:
        """Run a shared transition `loops` times from now on; None is what the layout says."""
        self.set_depth(None if loops is None else Fixed(loops))

    def set_depth(self, depth: Depth | None, *, grad_steps: int | None = None) -> None:
        """Run every loop as deep as `depth` says from now on; None is what the layout says.

        A saved config has the largest number of loops. A cache that was filled at another depth cannot be used again.
        Where tokens may leave, an output has `depth`: how many steps each token took, a tensor per loop. `grad_steps`
        truncates backpropagation to that many last steps of a loop.
        """
        loops, unrolled = None, self.unrolled
        if depth is not None:
            if getattr(depth, "mode", None) == "compact":
                raise ValueError(
                    "mode='compact' gathers sequences, which a foreign decoder does not; choose mode='end'"
                )
            batch = len(depth.counts) if isinstance(depth, PerSequence | PerToken) else 1
            counts = {depth.count_steps(cast(Loop, loop), batch) for loop in self.loops}
            # An exit leaves each loop its own number, where they have several.
            loops = counts.pop() if len(counts) == 1 else None
        config = cast(LoopedDecoderConfig, cast(PreTrainedModel, self).config)
        config.loops = loops
        unrolled.decode = self.reader() if depth is not None and depth.leaves else None
        unrolled.unroll(config.segments, depth, grad_steps=grad_steps)
        hooks = cast(nn.Module, self)._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is _tell_depth]:
            del hooks[key]
        if depth is not None and depth.leaves:
            cast(nn.Module, self).register_forward_hook(_tell_depth)

    def reader(self) -> Callable[[Tensor], Tensor]:
        """The function from what a loop returns to logits, through norm and head; the coda is left out."""
        return functools.partial(_decode, self)

    @staticmethod
    def _load_pretrained_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = PreTrainedModel._load_pretrained_model(model, *args, **kwargs)
        lacking = sorted(name for name in loaded[0].missing_keys if ".loops." in f".{name}")
        if lacking:
            raise ValueError(
                f"the weights have nothing for {len(lacking)} parameters of the transition, such as {lacking[0]}; load "
                "the base with AutoModelForCausalLM and loop it with looptim.loop_model"
            )
        return loaded


def _decode(model: Any, h: Tensor) -> Tensor:
    return model.get_output_embeddings()(model.base_model.norm(h)).float()


def _tell_depth(model: Any, given: Any, out: Any) -> None:
    if isinstance(out, ModelOutput):
        cast(Any, out).depth = tuple(model.unrolled.depths)


def install(model: PreTrainedModel, config: LoopedDecoderConfig) -> None:
    """Put loops around some layers of a model that was built with the distinct ones."""
    base = model.config
    # The architecture has chosen them for the config it was built with.
    config._attn_implementation = base._attn_implementation
    config._experts_implementation = base._experts_implementation
    for part in model.modules():
        if part.__dict__.get("config") is base:
            part.config = cast(Any, config)
    body, name = find_layers(model)
    first = next(model.parameters())
    loops = [
        build_loop(config, segment.loops, config.hidden_size).to(first.device, first.dtype)
        for segment in parse_layout(config.layout)
        if segment.loops is not None
    ]
    layers = list(body.get_submodule(name).children())
    unrolled = UnrolledLayers(layers, loops, config.segments)
    setattr(body, name, unrolled.train(model.training))


def build_loop(config: LoopedDecoderConfig, loops: int, width: int) -> Loop:
    """A loop of a decoder, for this width."""
    preset, options = config.loop["preset"], config.loop["options"]
    for name in sorted(options.keys() & {"name", "width", "steps"}):
        raise ValueError(f"{name} is not an option of a loop; it is set by the layout and from the model")
    # A norm inside a transition is a norm of the model like any other.
    known = "norm_eps" in options_of(preset) and hasattr(config, "rms_norm_eps")
    eps = {"norm_eps": config.rms_norm_eps} if known else {}
    loop = build_named(preset, width=width, steps=loops, **eps | options)
    if mixes_tokens(loop):
        raise ValueError(
            f"{preset} with these options reads the state of the token before, which no KV cache holds; "
            "choose a transition without token_shift"
        )
    return loop


def find_layers(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """The part of a decoder that has its layers, and the name they have there."""
    body = model.base_model
    lists = [name for name, part in body.named_children() if isinstance(part, nn.ModuleList)]
    if len(lists) != 1:
        raise ValueError(
            f"{type(body).__name__} does not keep its layers in one list ({', '.join(lists) or 'it has none'}), so it "
            "cannot be looped; give a decoder such as AutoModelForCausalLM loads"
        )
    return body, lists[0]


@functools.cache
def _config_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The looped form of a config class; the Auto classes learn of it and of its models."""
    config = type(
        f"Looped{base.__name__}",
        (LoopedDecoderConfig, base),
        {"__module__": __name__, "__init__": LoopedDecoderConfig.__init__},
    )
    for auto, mapping in ((AutoModel, MODEL_MAPPING), (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)):
        auto.register(config, _model_class(mapping[base], config))
    return config


def causal_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of the looped causal model of a looped config."""
    return cast(Any, AutoModelForCausalLM._model_mapping)[type(config)]


@functools.cache
def _model_class(base: type[PreTrainedModel], config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    return type(
        f"Looped{base.__name__}",
        (LoopedDecoder, base),
        {"__module__": __name__, "config_class": config, "config": None},
    )


def __getattr__(name: str) -> Any:
    # Classes are made when they are asked for, by the name that a pickle has too.
    base = getattr(transformers, name.removeprefix("Looped"), None) if name.startswith("Looped") else None
    if isinstance(base, type) and issubclass(base, PreTrainedConfig):
        return _config_class(base)
    if isinstance(base, type) and issubclass(base, PreTrainedModel):
        return _model_class(base, _config_class(base.config_class))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
