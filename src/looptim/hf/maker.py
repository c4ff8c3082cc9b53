"""How looptim's own trainer comes by a pretrained decoder, and what it has to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from ..config import Config
from ..loop import Loop
from ..model.build import build_loop
from ..model.count import training_flops
from ..training.distributed import World
from ..training.gate import check_transition
from ..training.maker import Maker, check_sampling
from ..training.mesh import Mesh
from .starts import near_base
from .trainee import Trainee, build_trainee, origin


def complete(config: Config) -> Config:
    """A recipe with the initial values that its preset gets on a pretrained decoder."""
    model = config.model
    loops = max((segment.loops or 1 for segment in model.segments), default=1)
    options = near_base(model.loop.preset, loops, model.loop.options)
    loop = model.loop.model_copy(update={"options": options})
    return config.model_copy(update={"model": model.model_copy(update={"loop": loop})})


def check(config: Config) -> None:
    """That a decoder can be trained by a recipe, as far as is seen without building it."""
    settings = config.train
    for key, given in {
        "train.compile": settings.compile,
        "train.reversible": settings.reversible,
        "train.loops.readouts": settings.loops.readouts,
        "model.pairs": config.model.pairs,
    }.items():
        if given:
            raise ValueError(f"{key} is not there for a decoder of transformers; leave it out")
    counts = [segment.loops for segment in config.model.segments if segment.loops is not None]
    if not counts:
        return
    check_transition(config)
    loops = [build_loop(config.model, count) for count in sorted(set(counts))]
    check_sampling(config, loops)


def build(config: Config, world: World, mesh: Mesh | None) -> Trainee:
    """The trainee on this process's device."""
    if mesh is not None:
        raise ValueError(
            f"one process trains a decoder of transformers, and there are {world.size}; start it without torchrun"
        )
    model = build_trainee(config).to(world.device)
    if model.__dict__["teacher"] is not None:
        model.__dict__["teacher"].to(world.device)
    return model


def role(model: nn.Module, name: str, parameter: Tensor) -> str:
    """The group of a decoder's parameter, by the kind of its module and by its shape."""
    path = name.split(".")
    owners = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    if any(isinstance(owner, Loop) for owner in owners):
        return "transition"
    if any(part.startswith("lora_") for part in path):
        return "adapters"
    if parameter.ndim < 2 or path[-1].endswith("bias"):
        return "vectors"
    if isinstance(owners[-1], nn.Embedding):
        return "embedding"
    if owners[-1] is cast(Trainee, model).looped.get_output_embeddings():
        return "head"
    if "experts" in path:
        return "experts"
    if any(_has_experts(owner) for owner in owners[-2:]) and "shared" not in name:
        return "router"
    return "matrices"


def _has_experts(module: nn.Module) -> bool:
    return "experts" in dict(module.named_children())


def describe(config: Config, model: Trainee) -> str:
    """The decoder in a line."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    name = type(model.looped).__name__
    return f"{name} {config.model.layout} {config.model.loop.preset}, {whole:,} parameters ({trained:,} trained)"


def flops(config: Config, documents: Sequence[int] | None) -> float:
    """Weights that are not trained have no gradient of their own, which is a third of an update."""
    whole = training_flops(config, documents=documents)
    return whole if config.pretrained.weights == "all" else whole * 2 / 3


DECODER = Maker(check=check, build=build, role=role, describe=describe, flops=flops, origin=origin)
"""Makes the looped decoder of a recipe."""
