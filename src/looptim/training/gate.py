"""The checks of a transition before it is trained: that it cannot see what it predicts, and is what it says."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import Config, ModelConfig
from ..loop import Loop, check_causality, check_gradient, mixes_tokens
from ..loop.causality import find_small_leak
from ..loop.far import ELEMENTS, GENERATION, TRAINING, find_far_leak, find_leak_at
from ..loop.probe import on_cpu
from ..loop.registry import NUMERICS, code_of
from ..model.build import build_loop
from ..rundir import RunDir

SMALL = 512
"""The width of the copy that gets all checks; a wider loop is run only once more, in the shape of its training."""
TINY = 32
"""The width of the copy that is run in shapes and ways which are not those of its training."""


def check_transition(config: Config) -> None:
    """Check that a recipe's loops leak no information between tokens or sequences, and that steps are gradient steps.

    A separate write map may differ from the adjoint of the read, as in half of the published transitions. A leak is
    refused unless the recipe says `loop.noncausal = true`.
    """
    model = config.model
    for steps in sorted({segment.loops for segment in model.segments if segment.loops is not None}):
        small = small_copy(model.width, lambda width, steps=steps: _build(model, width, steps))
        check_gradient(small, allow_mismatch=True)
        if config.data.mask_attention and mixes_tokens(small):
            raise ValueError(
                f"{model.loop.preset} lets a token read the state of the one before, which may be of another document; "
                "set data.mask_attention=false, or choose a transition that does not"
            )
        found = None if model.loop.noncausal else find_small_leak(small)[0] or _find_far(config, steps)
        if found is not None:
            raise ValueError(
                f"{found}; fix it or, if it is intended, set noncausal = true under [loop], which every table and "
                "report will say"
            )


def check_loop(loop: Loop) -> None:
    """The same for a loop outside of a recipe, which has no way to permit a leak."""
    check_gradient(loop, allow_mismatch=True)
    check_causality(loop)


def small_copy(width: int, build: Callable[[int], Loop], small: int = SMALL) -> Loop:
    """The loop that `build` returns for a width, or a narrower one that is faster to check."""
    with torch.random.fork_rng(devices=[]), on_cpu():
        torch.default_generator.manual_seed(0)
        try:
            return build(min(width, max(small, 8)))
        except ValueError:
            if width <= small:
                raise
            # Options may be tied to the width, as a number of heads is.
            return build(width)


def check_code(config: Config, folder: RunDir, *, force: bool) -> None:
    """Check that the code that began a run also resumes it; `force` only warns."""
    change = code_change(config.model, recorded_code(folder), folder.path)
    if change is not None and not force:
        raise ValueError(f"{change}; undo that, or add --force")
    if change is not None:
        print(change, file=sys.stderr)


def recorded_code(folder: RunDir) -> dict[str, Any]:
    """What a run records about its code: the hash of its preset, and the version of looptim's numbers."""
    file = folder.environment_file
    try:
        record = dict(json.loads(file.read_text())) if file.is_file() else {}
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{file} is damaged; restore it from a copy, or delete it") from None
    return {key: record[key] for key in ("code", "numerics") if key in record}


def code_change(model: ModelConfig, record: Mapping[str, Any], path: Path) -> str | None:
    """What has changed in its code since a model was trained, in a sentence; None if nothing is known to have."""
    code = code_of(model.loop.preset)
    if record.get("code", code) != code:
        return f"the code of {model.loop.preset} has changed since {path} was trained with it"
    if record.get("numerics", 1) != NUMERICS:
        return f"what looptim computes has changed since {path} was trained (numerics {NUMERICS})"
    return None


def _find_far(config: Config, steps: int) -> str | None:
    """What a loop wrongly sees in the shape, the precision and the depth of its training, and elsewhere."""
    model, settings = config.model, config.train
    shape = (settings.micro_batch or settings.batch_size, settings.seq_len)
    # A narrow copy affords all tokens of a long sequence; the loop at its full width gets some of them.
    narrow = small_copy(model.width, lambda width: _build(model, width, steps), ELEMENTS // (8 * settings.seq_len))
    # Loops with parameters of their own cannot be sampled, which is refused elsewhere.
    deeper = math.ceil(2 * settings.loops.mean) if narrow.shared and settings.loops.scheme != "fixed" else 0
    ways = tuple(way._replace(autocast=settings.dtype == "bf16") for way in (TRAINING, GENERATION))
    how: dict[str, Any] = {"ways": ways, "steps": max(steps, deeper)}
    found = find_leak_at(narrow, *shape, **how) or find_leak_at(narrow, 1, settings.seq_len, **how)
    found = found or find_far_leak(small_copy(model.width, lambda width: _build(model, width, steps), TINY))
    if found is not None or narrow.width == model.width:
        return found
    with torch.random.fork_rng(devices=[]), on_cpu():
        torch.default_generator.manual_seed(0)
        return find_leak_at(build_loop(model, steps), *shape, **how)


def _build(model: ModelConfig, width: int, steps: int) -> Loop:
    return build_loop(model.model_copy(update={"width": width}), steps)
