"""Initial values under which a looped pretrained model begins near the model it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..loop.base import logit
from ..loop.registry import check_options, options_of

FAR = 1e4
"""Where a bound on what a loop reads or writes starts: pretrained states have channels in the hundreds and more."""


def _operloop(loops: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """One stream read as it is; the first loop writes all of its error and the later ones a tenth of theirs.

    A shared transition writes the same part in every loop: `loops` damped steps in place of one.
    """
    streams = given.get("streams", 1)
    steps: dict[str, Any] = {"step_init": 0.99, "later_step": 0.1}
    if given.get("shared"):
        steps = {"step": "sigmoid", "step_init": min(1 / loops, 0.99)}
    return {"streams": streams, "read_init": min(1 / streams, 0.99), "decay_init": 0.001, **steps}


def _nesterov(loops: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """As OperLoop, whose first step is here `1 + beta` times as long as its size says."""
    start = _operloop(loops, given)
    return start | {"step_init": start["step_init"] / (1 + max(given.get("beta", 0.5), 0.0))}


def _hyperloop(loops: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The mean of the streams is read, and `1 / loops` of the answer written to each: damped steps."""
    share = min(max(1 / loops, 0.01), 0.99)
    return {"read_init": min(1 / given.get("streams", 4), 0.99), "keep_init": 1 - share, "write_init": share}


def _hyperloop_aligned(loops: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Writes with the weights it reads with, so that as many streams as loops make damped steps of `1 / loops`."""
    streams = given.get("streams", max(loops, 2))
    return {"streams": streams, "read_init": min(1 / streams, 0.99), "keep_init": max(1 - 1 / streams, 0.01)}


def _recurrentgpt(loops: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The state alone is read, and `1 / loops` of it exchanged: damped steps."""
    keep = logit(min(max(1 - 1 / loops, 0.01), 0.99), "the gate")
    return {"noise": 0.0, "state_init": 1.0, "input_init": 0.0, "gate_bias": keep}


STARTS: dict[str, Callable[[int, Mapping[str, Any]], dict[str, Any]]] = {
    # Every loop reads the loop's input, as the base does, and hardly the state.
    "huginn": lambda loops, given: {
        "inject": "concat",
        "start": "prelude",
        "state_init": 0.001,
        "input_init": 1.0,
    },
    "parcae": lambda loops, given: {"std": 0.0, "keep_init": 0.001, "readout": "identity", "readout_init": 1.0},
    # What is written through the small gain of the state, the read-out takes back.
    "parcae_aligned": lambda loops, given: {
        "std": 0.0,
        "keep_init": 0.01,
        "readout": "identity",
        "readout_init": 100.0,
    },
    "recurrentgpt": _recurrentgpt,
    "recurrentgpt_aligned": _recurrentgpt,
    "hyperloop": _hyperloop,
    "hyperloop_aligned": _hyperloop_aligned,
    "operloop_nesterov": _nesterov,
    "operloop_bounded": lambda loops, given: _operloop(loops, given) | {"bound": FAR},
    "operloop_robust": lambda loops, given: _operloop(loops, given) | {"c": FAR},
}
"""By preset. OperLoop and its variants have one start, and presets that are not here have nothing to choose."""


def near_base(preset: str, loops: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a preset for a pretrained model: those given, and for the rest those that begin near the base.

    docs/pretrained.md has the distance of each, measured.

    >>> near_base("operloop", 2, {"later_step": 0.5})["later_step"]
    0.5
    """
    check_options(preset, given)
    start = STARTS.get(preset)
    if start is None and "later_step" in options_of(preset):
        start = _operloop
    chosen = start(loops, given) if start else {}
    return {name: value for name, value in chosen.items() if name in options_of(preset)} | dict(given)
