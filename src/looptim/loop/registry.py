"""Presets by name: how they are entered, how one is built, and what its options may be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from ..base.choices import choose
from .base import require, signature_of
from .loop import Loop

PRESETS: dict[str, Callable[..., Loop]] = {}
"""Name to preset. Add your own: `PRESETS["mine"] = lambda width, steps: Loop(...)`."""


def options_of(name: str) -> list[str]:
    """The names of a preset's options."""
    parameters = signature_of(choose("preset", name, PRESETS)).parameters
    return [option for option in parameters if option not in ("width", "steps")]


def build(name: str, *, width: int, steps: int, **options: Any) -> Loop:
    """The preset `name` for inputs of `width`, looped `steps` times.

    >>> build("vanilla", width=8, steps=3).name
    'vanilla'
    """
    preset = choose("preset", name, PRESETS)
    parameters = signature_of(preset).parameters
    known = options_of(name)
    unknown = sorted(set(options) - set(known))
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if unknown and not takes_any:
        listed = f"its options are {', '.join(known)}" if known else "it has no options"
        raise ValueError(f"{name} has no option {', '.join(map(repr, unknown))}; {listed}")
    for key, value in {"width": width, "steps": steps, "streams": options.get("streams", 1)}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} must be a whole number of at least 1, got {value!r}")
    for key in sorted(options.keys() & parameters.keys()):
        _check_option(name, parameters[key], options[key])
    loop = preset(width, steps, **options)
    require(f"what the preset {name} returns", loop, Loop)
    return loop


KINDS: dict[str, tuple[type, str]] = {
    "bool": (bool, "true or false"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "None": (type(None), "none"),
}
"""What the annotation of an option says of its value; a word, or whatever else, is for the preset to check."""


def _check_option(preset: str, option: inspect.Parameter, value: Any) -> None:
    # Recipes and --set bring whatever was written there, and the text "False" would count as true.
    given = option.annotation if isinstance(option.annotation, str) else inspect.formatannotation(option.annotation)
    if not KINDS.keys() >= set(given.split(" | ")):
        return
    kinds = [KINDS[word] for word in given.split(" | ")]
    if not any(isinstance(value, kind) and (kind is bool) == isinstance(value, bool) for kind, _ in kinds):
        wanted = " or ".join(words for _, words in kinds)
        raise ValueError(f"{option.name} of {preset} must be {wanted}, got {value!r}")


def register(preset: Callable[..., Loop]) -> Callable[..., Loop]:
    """Enter a preset under its function's name, which with its docstring becomes the loop's name and summary."""
    name = preset.__name__

    @functools.wraps(preset)
    def named(*args: Any, **options: Any) -> Loop:
        loop = preset(*args, **options)
        require(f"what the preset {name} returns", loop, Loop)
        loop.name, loop.summary = name, inspect.cleandoc(preset.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        return loop

    PRESETS[name] = named
    return named
