"""How a recipe becomes the model that is trained; here, a model of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from ..config import Config
from ..loop import Loop
from ..loop.depth import Fixed
from ..model import LoopedLM
from ..model.count import count, training_flops
from .distributed import World
from .gate import check_transition
from .mesh import Mesh, build
from .optim import role_of


@final
@dataclasses.dataclass(frozen=True)
class Maker:
    """How a training makes its model: `OURS` makes a `LoopedLM`, and `hf.maker` a looped decoder."""

    check: Callable[[Config], None]
    """Raises a ValueError if the model of a recipe cannot be trained, before anything is read or built."""
    build: Callable[[Config, World, Mesh | None], Any]
    """The model, with the `loss` of a `LoopedLM`, on this process's device."""
    role: Callable[[nn.Module, str, Tensor], str]
    """The group of a parameter in the optimizer."""
    describe: Callable[[Config, Any], str]
    """One line about the model."""
    flops: Callable[[Config, Sequence[int] | None], float]
    """Training FLOPs of a token, given the lengths of the documents in a sequence."""
    origin: Callable[[Config], dict[str, Any]]
    """What a run records about initial weights that are not drawn at random."""


def check_origin(config: Config, record: Mapping[str, Any], origin: Mapping[str, Any], path: Path) -> None:
    """Check that the weights a run began with are still those that its checkpoint belongs to."""
    if record.get("base") != origin.get("base"):
        raise ValueError(
            f"the weights in {config.pretrained.folder} are not those that {path} began with; bring them back, or "
            "train into a new folder"
        )


def check_model(config: Config) -> None:
    """Check that a recipe's model builds, sees no future, keeps documents apart, and can sample and cut its loops."""
    with torch.device("meta"):
        model = LoopedLM(config.model, seed=0)
    if config.model.pairs != bool(config.data.options.get("pairs")):
        raise ValueError(
            f"model.pairs ({config.model.pairs}) and data.options.pairs must agree: both say that a position reads two "
            "tokens; set both or none"
        )
    if config.data.mask_attention:
        model.check_documents()
    check_transition(config)
    check_sampling(config, [loop for loop in model.loops if isinstance(loop, Loop)])


def check_sampling(config: Config, looped: Sequence[Loop]) -> None:
    """Check that loops can run as often, and can be cut where, the recipe says."""
    loops, preset = config.train.loops, config.model.loop.preset
    if loops.scheme == "fixed" and loops.grad_loops is None and not loops.warmup:
        return
    if not all(loop.shared for loop in looped):
        raise ValueError(
            f"train.loops needs a transition shared over loops, which {preset} is not; "
            "set loop.options.shared=true where the preset has it, or leave train.loops out"
        )
    if loops.grad_loops is not None and not all(map(_reads_input, looped)):
        raise ValueError(
            f"train.loops.grad_loops would leave what precedes the loop without a gradient: {preset} reads it before "
            "the first loop only; choose a transition that reads it in every loop, such as huginn, or leave it out"
        )


def _reads_input(loop: Loop) -> bool:
    """Whether a gradient through the last of two loops reaches the loop's input."""
    e = torch.empty(1, 1, loop.width, device="meta", requires_grad=True)
    blocks = torch.nn.Linear(loop.width, loop.width, device="meta")
    (gradient,) = torch.autograd.grad(loop(e, blocks, depth=Fixed(2), grad_steps=1).sum(), e, allow_unused=True)
    return gradient is not None


def _describe(config: Config, model: Any) -> str:
    counted = count(config)
    parameters, active = sum(counted.parameters.values()), sum(counted.active.values())
    return f"{counted.name}, {parameters:,} parameters ({active:,} active)"


OURS = Maker(
    check=check_model,
    build=build,
    role=role_of,
    describe=_describe,
    flops=lambda config, documents: training_flops(config, documents=documents),
    origin=lambda config: {},
)
"""Makes the `LoopedLM` of a recipe."""
