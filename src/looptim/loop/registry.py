"""Presets by name: how they are entered, which code they are made of, how one is built, and what its options may be."""

from __future__ import annotations

import functools
import inspect
from collections import UserDict
from collections.abc import Callable
from importlib.metadata import entry_points
from numbers import Integral, Real
from typing import Any, final

from ..base.choices import choose
from ..base.code import allow, find_code, is_reference
from ..base.source import hash_of
from .base import require, signature_of
from .loop import Loop

NUMERICS = 1
"""The version of what the shipped transitions compute, which the golden curve pins; it is a part of every result."""
ENTRY_POINTS = "looptim.presets"
"""The group in which an installed package says which presets it has."""

Preset = Callable[..., Loop]


@final
class Presets(UserDict[str, Preset]):
    """Name to preset, and the hash of the code with which each was entered: its file may be edited after that."""

    def __init__(self) -> None:
        self.codes: dict[str, str | None] = {}
        super().__init__()

    def __setitem__(self, name: str, preset: Preset) -> None:
        self.enter(name, preset, hash_of(preset))

    def enter(self, name: str, preset: Preset, code: str | None) -> None:
        """Enter a preset of which the hash is known, as in a worker that has it from elsewhere."""
        self.data[name], self.codes[name] = preset, code


PRESETS = Presets()
"""Name to preset. Add your own: `PRESETS["mine"] = lambda width, steps: Loop(...)`."""


def _find(name: str) -> tuple[Preset, str | None]:
    """A preset by its name, or by where its code is, and the hash of that; None for a shipped one."""
    if not isinstance(name, str) or name not in PRESETS:
        if is_reference(name):
            preset, code = find_code(name)
            return _named(preset, name), code
        # What is installed is there by its user's will, as a shipped preset is.
        installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        try:
            point = choose("preset", name, dict.fromkeys(PRESETS) | installed)
        except ValueError as error:
            raise ValueError(f"{error}; your own goes by file.py:function, or --import what registers it") from None
        assert point is not None
        try:
            PRESETS[name] = _named(point.load(), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"the preset {name} of {point.value} does not load ({error}); mend or remove it"
            ) from error
    return PRESETS[name], PRESETS.codes[name]


def preset_of(name: str) -> Preset:
    """The preset that a name stands for. Code that only a file names is not run."""
    return _find(name)[0]


def code_of(name: str) -> str | None:
    """The hash of the source that a user's preset is made of; None for a shipped preset, which has `NUMERICS`.

    >>> code_of("operloop") is None
    True
    """
    return _find(name)[1]


def options_of(name: str) -> list[str]:
    """The names of a preset's options."""
    parameters = signature_of(preset_of(name)).parameters
    return [option for option in parameters if option not in ("width", "steps")]


def build(name: str, *, width: int, steps: int, **options: Any) -> Loop:
    """The preset `name` for inputs of `width`, looped `steps` times; your own may be `file.py:function`.

    >>> build("vanilla", width=8, steps=3).name
    'vanilla'
    """
    allow(name)
    return build_named(name, width=width, steps=steps, **options)


def build_named(name: str, *, width: int, steps: int, **options: Any) -> Loop:
    """`build` for a name that may stem from a file: code that it asks for runs only if the caller has allowed it."""
    preset = preset_of(name)
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


def register(preset: Preset) -> Preset:
    """Enter a preset under its function's name, which with its docstring becomes the loop's name and summary."""
    PRESETS[preset.__name__] = named = _named(preset, preset.__name__)
    return named


def _named(preset: Preset, name: str) -> Preset:
    """A preset whose loops have its name, and the first paragraph of its docstring as their summary."""

    @functools.wraps(preset)
    def named(*args: Any, **options: Any) -> Loop:
        loop = preset(*args, **options)
        require(f"what the preset {name} returns", loop, Loop)
        loop.name, loop.summary = name, inspect.cleandoc(preset.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        return loop

    return named
