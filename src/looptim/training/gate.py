"""What is asked of a transition before it is trained: that it cannot see what it is to predict, and is what it says."""

from __future__ import annotations

import json

import torch

from ..config import Config, ModelConfig
from ..loop import Loop, check_gradient, mixes_tokens
from ..loop.causality import find_leak, find_leak_at
from ..loop.source import code_of
from ..model.build import build_loop
from ..rundir import RunDir

SMALL = 512
"""The width of the copy that is asked everything; a wider loop is only run once more, in the shape of its training."""


def check_transition(config: Config) -> None:
    """That no token of a recipe's loops sees a later one or another sequence, and that their steps are gradient steps.

    A write map that is spelled out may differ from the adjoint of the read, as in half of the published transitions.
    A leak is refused unless the recipe says `loop.noncausal = true`.
    """
    model, settings = config.model, config.train
    shape = (settings.micro_batch or settings.batch_size, settings.seq_len)
    for steps in sorted({segment.loops for segment in model.segments if segment.loops is not None}):
        small = _small_copy(model, steps)
        check_gradient(small, allow_mismatch=True)
        if config.data.mask_attention and mixes_tokens(small):
            raise ValueError(
                f"{model.loop.preset} lets a token read the state of the one before, which may be of another document; "
                "set data.mask_attention=false, or choose a transition that does not"
            )
        found = None if model.loop.noncausal else find_leak(small)[0] or find_leak_at(_build(model, steps), *shape)
        if found is not None:
            raise ValueError(
                f"{found}; mend that, or, if it is meant, write noncausal = true under [loop], which every table and "
                "report will say"
            )


def check_code(config: Config, folder: RunDir, *, force: bool) -> None:
    """That a run is resumed by the code that began it, where its preset is the user's own."""
    preset, file = config.model.loop.preset, folder.environment_file
    record = json.loads(file.read_text()) if file.is_file() else {}
    if record.get("code", code_of(preset)) != code_of(preset) and not force:
        raise ValueError(
            f"the code of {preset} has changed since {folder.path} was trained with it; undo that, or add --force"
        )


def _small_copy(model: ModelConfig, steps: int) -> Loop:
    if model.width <= SMALL:
        return _build(model, steps)
    try:
        return _build(model.model_copy(update={"width": SMALL}), steps)
    except ValueError:
        # Options may be bound to the width, as a number of heads is.
        return _build(model, steps)


def _build(model: ModelConfig, steps: int) -> Loop:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return build_loop(model, steps)
