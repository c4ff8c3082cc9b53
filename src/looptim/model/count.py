"""Parameters, FLOPs and cache bytes of a model, by component and by convention, counted on the meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..base.markup import html_table
from ..config import Config, ModelConfig, shape
from ..loop import Loop
from .layout import LayerSpec, Layout
from .lm import LoopedLM

VOCABULARY = ("embedding", "head")
COMPONENT_HEAD = ("component", "parameters", "active", "forward FLOPs/token")
CONVENTION_HEAD = ("quantity", "convention", "value")
FLOP_PARTS = ("attention", "attention scores", "dense FFN", "routed", "shared", "router", "transition", "head")


@final
@dataclasses.dataclass(frozen=True)
class Count:
    """What a model costs. FLOPs are per token of a forward pass at `seq_len`; a multiply-add counts as two.

    Each sequence is one document unless `count` was given document lengths.

    Norms, RoPE, activations and softmax of the backbone are not counted, as is usual. A transition is mostly
    elementwise, so it is counted operation by operation.
    """

    name: str
    seq_len: int
    distinct_blocks: int
    depth: int
    """Unrolled layers."""
    parameters: dict[str, int]
    active: dict[str, int]
    """Parameters that a token uses, each counted once however often it is looped over."""
    flops: dict[str, float]
    kv_bytes_per_token: int
    """Bytes of a bf16 cache with a slot per unrolled layer, as long as no window is full."""
    kv_bytes: int
    """Bytes for one sequence of `seq_len`; sliding layers keep only their window."""

    def parameter_conventions(self) -> dict[str, int]:
        """The parameter count under every convention in use."""
        vocabulary = sum(self.parameters[part] for part in VOCABULARY)
        total = sum(self.parameters.values())
        return {
            "total": total,
            "non-vocabulary": total - vocabulary,
            "non-vocabulary without norms": total - vocabulary - self.parameters["norms"],
            "distinct blocks": self.distinct_blocks,
        }

    def active_conventions(self) -> dict[str, int]:
        """The active parameters with and without the vocabulary."""
        total = sum(self.active.values())
        return {"total": total, "non-vocabulary": total - sum(self.active[part] for part in VOCABULARY)}

    def flop_conventions(self) -> dict[str, float]:
        """Forward FLOPs per token under every convention in use; training takes three times as many."""
        total = sum(self.flops.values())
        return {
            "total": total,
            "without head": total - self.flops["head"],
            "without attention scores": total - self.flops["attention scores"],
            "without transition": total - self.flops["transition"],
            "unrolled layers": self.depth,
        }

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {
            **dataclasses.asdict(self),
            "parameter_conventions": self.parameter_conventions(),
            "active_conventions": self.active_conventions(),
            "flop_conventions": self.flop_conventions(),
            "training_flops_per_token": 3 * sum(self.flops.values()),
        }

    def _repr_html_(self) -> str:
        title = f"{self.name}: {self.distinct_blocks} distinct blocks, depth {self.depth}, {self.seq_len} tokens"
        parts = html_table(component_cells(self), head=COMPONENT_HEAD, title=title)
        return parts + html_table(convention_cells(self), head=CONVENTION_HEAD)

    def ratios(self, other: Count) -> dict[str, dict[str, float]]:
        """The ratios of this count to another, by the name of each convention."""

        def divide(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
            return {key: value / theirs[key] for key, value in ours.items() if theirs[key]}

        return {
            "parameters": divide(self.parameter_conventions(), other.parameter_conventions()),
            "active": divide(self.active_conventions(), other.active_conventions()),
            "flops": divide(self.flop_conventions(), other.flop_conventions()),
            "kv cache": {"per sequence": self.kv_bytes / other.kv_bytes},
        }


def component_cells(ours: Count) -> list[list[str]]:
    """The components as rows of strings: parameters, active parameters, FLOPs."""
    columns = (ours.parameters, ours.active, ours.flops)
    parts = dict.fromkeys([*ours.parameters, *ours.flops])
    return [[part, *(f"{column[part]:,.0f}" if part in column else "" for column in columns)] for part in parts]


def convention_cells(ours: Count, other: Count | None = None) -> list[list[str]]:
    """The totals under each convention as rows of strings, with ratios to another model's if it is given."""
    ratios = ours.ratios(other) if other else None
    conventions = {
        "parameters": ours.parameter_conventions(),
        "active": ours.active_conventions(),
        "flops": ours.flop_conventions(),
        "kv cache": {"per sequence": ours.kv_bytes},
    }
    return [
        [quantity, name, f"{value:,.0f}", *([f"{ratios[quantity].get(name, float('nan')):.3f}"] if ratios else [])]
        for quantity, values in conventions.items()
        for name, value in values.items()
    ]


def count(
    config: Config | ModelConfig | nn.Module, *, seq_len: int | None = None, documents: Sequence[int] | None = None
) -> Count:
    """Count parameters and FLOPs of a model without allocating it.

    Of a decoder of transformers, looped or not, the parameters are its own, and the FLOPs are those of a layer of ours
    of the same shape, which computes what a Llama's layer does.

    The cost of attention within documents (`data.mask_attention`) depends on the data: `documents` holds the lengths of
    a fair sample of documents, as they lie in sequences. Without it every sequence is one document, which is the upper
    bound.

    >>> paper = count(ModelConfig(layout="18"))
    >>> paper.parameter_conventions()["non-vocabulary without norms"]
    4974444544
    """
    if isinstance(config, nn.Module) and hasattr(config, "config"):
        return _count_decoder(config, seq_len, documents)
    if not isinstance(config, (Config, ModelConfig)):
        raise ValueError(
            f"count takes a Config or a ModelConfig, got {type(config).__name__}, or a decoder of transformers; "
            "load_config returns one"
        )
    model_config = config.model if isinstance(config, Config) else config
    if seq_len is None:
        seq_len = config.train.seq_len if isinstance(config, Config) else config.max_length
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, got {seq_len}")
    documents = [seq_len] if documents is None else documents
    if not documents or min(documents) < 1 or max(documents) > seq_len:
        given = f"from {min(documents)} to {max(documents)}" if documents else "none"
        raise ValueError(f"documents must be lengths from 1 to seq_len ({seq_len}), got {given}; cut longer ones")
    with torch.device("meta"):
        model = LoopedLM(model_config, seed=0)
    layout = Layout.of(model_config)
    kv_bytes_per_layer = 2 * 2 * model_config.kv_heads * model_config.head_dim
    kept = [min(layer.attention.window or seq_len, seq_len) for layer in layout.layers]
    parameters = _parameters(model)
    return Count(
        name=f"{model_config.layout} {model_config.loop.preset}",
        seq_len=seq_len,
        distinct_blocks=len(layout.blocks),
        depth=len(kept),
        parameters=parameters,
        active=_active(model_config, parameters),
        flops=_flops(model_config, model, documents),
        kv_bytes_per_token=kv_bytes_per_layer * len(kept),
        kv_bytes=kv_bytes_per_layer * sum(kept),
    )


def _count_decoder(model: nn.Module, seq_len: int | None, documents: Sequence[int] | None) -> Count:
    known = getattr(model, "config")  # noqa: B009
    if isinstance(known, ModelConfig):
        return count(known, seq_len=seq_len, documents=documents)
    config = ModelConfig(**shape(known.to_dict()))
    config = config if getattr(known, "loops", None) is None else config.with_loops(known.loops)
    ours = count(config, seq_len=seq_len, documents=documents)
    parameters = dict.fromkeys(ours.parameters, 0)
    for name, parameter in model.named_parameters():
        parameters[_component_of_decoder(name, parameter)] += parameter.numel()
    return dataclasses.replace(ours, parameters=parameters, active=_active(config, parameters))


def _component_of_decoder(name: str, parameter: torch.Tensor) -> str:
    """The component a parameter of a foreign decoder belongs to, by the words that transformers uses."""
    if ".loops." in f".{name}":
        return "transition"
    if parameter.ndim < 2 and "norm" in name:
        return "norms"
    words = {
        "embed": "embedding",
        "lm_head": "head",
        "attn": "attention",
        ".experts.": "routed",
        "shared_exp": "shared",
    }
    words |= {"router": "router", "mlp.gate.": "router"}
    return next((part for word, part in words.items() if word in name), "dense FFN")


def training_flops(config: Config, *, documents: Sequence[int] | None = None) -> float:
    """FLOPs per token of an update of mean depth; the backward pass costs twice the loops that it covers.

    `documents` is that of `count`: without it, a sequence is one document.
    """
    loops, model = config.train.loops, config.model
    if loops.scheme != "fixed":
        model = model.with_loops(max(1, round(loops.mean + (loops.scheme == "huginn"))))
    differentiated = model if loops.grad_loops is None else model.with_loops(loops.grad_loops, at_most=True)
    forward, backward = (
        sum(count(each, seq_len=config.train.seq_len, documents=documents).flops.values())
        for each in (model, differentiated)
    )
    early = 3 * _readout_flops(config.model, config.train.seq_len, documents) * loops.readouts
    return forward + 2 * backward + early


def _readout_flops(config: ModelConfig, seq_len: int, documents: Sequence[int] | None) -> float:
    """FLOPs per token of one extra read-out: coda and head."""
    segments = Layout.of(config).segments
    last = max((i for i, segment in enumerate(segments) if segment.looped), default=len(segments))
    coda = [layer for segment in segments[last + 1 :] for layer in segment.steps[0]]
    flops = _block_flops(config, coda, [seq_len] if documents is None else documents)
    return sum(flops.values()) + 2 * config.width * config.vocab_size


def _parameters(model: LoopedLM) -> dict[str, int]:
    parts: dict[str, int] = dict.fromkeys(
        ("attention", "dense FFN", "routed", "shared", "router", "norms", "transition", "embedding", "head"), 0
    )
    for name, parameter in model.named_parameters():
        parts[_component(name)] += parameter.numel()
    return parts


def _component(name: str) -> str:
    """The component that a parameter belongs to, judged by its name."""
    if name.startswith("loops."):
        return "transition"
    if name.endswith(".gain"):
        return "norms"
    for part, component in {
        "embedding.": "embedding",
        "head.": "head",
        ".attention.": "attention",
        ".router.": "router",
        ".experts.": "routed",
        ".shared.": "shared",
    }.items():
        if part in name:
            return component
    assert ".feedforward." in name, name
    return "dense FFN"


def _active(config: ModelConfig, parameters: dict[str, int]) -> dict[str, int]:
    """The parameters a token uses: top_k routed experts and all else; a tied head counts as embedding."""
    return {**parameters, "routed": parameters["routed"] * config.top_k // config.experts}


def _flops(config: ModelConfig, model: LoopedLM, documents: Sequence[int]) -> dict[str, float]:
    flops = _block_flops(config, Layout.of(config).layers, documents)
    flops["head"] = 2 * config.width * config.vocab_size
    flops["transition"] = sum(transition_flops(loop) for loop in model.loops if isinstance(loop, Loop))
    return flops


def _block_flops(config: ModelConfig, layers: Sequence[LayerSpec], documents: Sequence[int]) -> dict[str, float]:
    width, attention_width = config.width, config.heads * config.head_dim
    kv_width = config.kv_heads * config.head_dim
    swiglu = 2 * 3 * width
    flops: dict[str, float] = dict.fromkeys(FLOP_PARTS, 0)
    for layer in layers:
        flops["attention"] += 2 * width * (2 * attention_width + 2 * kv_width)
        flops["attention scores"] += 2 * 2 * attention_width * mean_keys(documents, layer.attention.window)
        if layer.feedforward == "dense":
            flops["dense FFN"] += swiglu * config.dense_hidden
        else:
            flops["routed"] += swiglu * config.expert_hidden * config.top_k
            flops["shared"] += swiglu * config.shared_hidden
            flops["router"] += 2 * width * config.experts
    return flops


def mean_keys(documents: Sequence[int], window: int | None) -> float:
    """How many keys a query sees on average over documents of these lengths: `mean_i min(i + 1, window)`.

    >>> mean_keys([4], None), mean_keys([4], 1), mean_keys([3, 1], None)
    (2.5, 1.0, 1.75)
    """
    kept = [min(window or length, length) for length in documents]
    seen = sum(w * (w + 1) / 2 + (length - w) * w for length, w in zip(documents, kept, strict=True))
    return seen / sum(documents)


def transition_flops(loop: Loop) -> int:
    """FLOPs per token of everything a loop does besides its blocks, including start and read-out."""
    device = next((p.device for p in loop.parameters()), torch.device("meta"))
    e = torch.empty(1, 1, loop.width, device=device)
    with torch.no_grad(), _OperationCounter() as counter:
        # An observed loop takes the readable form, so the definition is counted, however the loop is computed.
        loop(e, lambda o: o, observe=lambda transition, record: None)
    return counter.flops


@final
class _OperationCounter(TorchDispatchMode):
    """Counts every operation: matmuls by torch's formulas, all others as one per element computed or reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif torch.Tag.pointwise in func.tags and "copy" not in packet.__name__:
            self.flops += _numel(out)
        elif torch.Tag.reduction in func.tags or packet.__name__ in ("_fused_rms_norm", "linalg_vector_norm"):
            self.flops += _numel(args[0])
        return out


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else sum(_numel(v) for v in value or ())
