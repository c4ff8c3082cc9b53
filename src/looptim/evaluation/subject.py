"""What is evaluated: a model of ours, or a looped decoder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..data import Tokenizer, task_options
from ..loading import open_model, wrap
from ..loop import Depth
from ..loop.depth import Fixed
from ..model import LoopedLM
from ..model.count import count
from ..rundir import RunDir

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel


class Subject(NamedTuple):
    """The model that is evaluated, and what every result records about it."""

    model: LoopedLM | PreTrainedModel
    tokenizer: Tokenizer
    wrapped: PreTrainedModel
    """The same weights, as transformers sees them."""
    loops: int | None
    """None for the number that the layout says."""
    depth: Depth | None
    """Where tokens leave; None where all run every loop."""
    trained: dict[str, Any]
    """Options of the synthetic task it learned, by name."""
    identity: dict[str, Any]
    """A hash; results are valid as long as it is the same."""
    folder: Path | None
    """Where transformers finds a decoder's own tokenizer."""


def open_subject(path: Path, loops: int | None, depth: Depth | None = None) -> Subject:
    """The model of a run or of a folder, at this depth."""
    model, tokenizer = open_model(path)
    if not isinstance(model, LoopedLM):
        return _decoder(path, model, tokenizer, loops, depth)
    wrapped = wrap(model.to(device()), loops=loops)
    if depth is not None:
        wrapped.set_depth(depth)
    wrapped.generation_config.eos_token_id = tokenizer.eos
    config = model.config if loops is None else model.config.with_loops(loops)
    cost = count(config)
    # A model may have parameters for each visit, which it does not gain or lose with the loops it is run for.
    own = cost if loops is None else count(model.config)
    identity = {
        "weights": _hash(model),
        "tokenizer": tokenizer.hash,
        "layout": config.layout,
        "loops": next((segment.loops for segment in config.segments if segment.loops), None),
        "exit_rule": "none: every token runs every loop" if depth is None else str(depth),
        "preset": config.loop.preset,
        "options": config.loop.options,
        **({"noncausal": True} if config.loop.noncausal else {}),
        "context_length": config.max_length,
        "dtype": str(wrapped.dtype).removeprefix("torch."),
        "parameters": own.parameter_conventions()["non-vocabulary"],
        "flops_per_token": cost.flop_conventions()["without head"],
    }
    return Subject(model, tokenizer, wrapped, loops, depth, _trained(path), identity, None)


def _decoder(path: Path, model: Any, tokenizer: Tokenizer, loops: int | None, depth: Depth | None) -> Subject:
    """A decoder of transformers, which stays at this depth."""
    wanted = depth if loops is None else Fixed(loops)
    if wanted is not None:
        if not hasattr(model, "unrolled"):
            raise ValueError(f"{type(model).__name__} has no loops; leave loops and depth out")
        model.set_depth(wanted)
    model.to(device())
    config, cost = model.config, count(model)
    loop = getattr(config, "loop", {"preset": "none", "options": {}})
    segments = getattr(config, "segments", [])
    identity = {
        "weights": _hash(model),
        "tokenizer": tokenizer.hash,
        "layout": getattr(config, "layout", str(config.num_hidden_layers)),
        "loops": next((segment.loops for segment in segments if segment.loops), None),
        "exit_rule": "none: every token runs every loop" if depth is None else str(depth),
        "preset": loop["preset"],
        "options": loop["options"],
        "context_length": config.max_position_embeddings,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": cost.parameter_conventions()["non-vocabulary"],
        "flops_per_token": cost.flop_conventions()["without head"],
    }
    # What runs it again would find it at this depth already.
    return Subject(model, tokenizer, model, None, None, _trained(path), identity, Path(model.config._name_or_path))


def _trained(path: Path) -> dict[str, Any]:
    """The options of the synthetic task that a run learned, as the run or its export says."""
    run = RunDir(path)
    if run.config_file.is_file():
        return task_options(run.config().data)
    return json.loads((path / "config.json").read_text()).get("task_specific_params") or {}


def _hash(model: nn.Module) -> str:
    """Tells trained weights apart by a thousand numbers of each tensor; the same for a run and its export."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().flatten()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def device() -> str:
    """Where models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
