"""Presets by name: how they are registered, which code they are made of, and how they are built."""

from __future__ import annotations

import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from numbers import Integral, Real
from typing import Any, final

from ..base.choices import choose
from ..base.code import allow, find_code, is_reference
from ..base.source import hash_of
from .base import require, signature_of
from .loop import Loop

NUMERICS = 1
"""The version of what the shipped transitions compute. The golden curve pins it, and every result records it."""
ENTRY_POINTS = "looptim.presets"
"""The entry-point group by which an installed package announces its presets."""

Preset = Callable[..., Loop]


@final
class Presets(UserDict[str, Preset]):
    """Presets by name, and the hash of the code of each at registration; its file may be edited later."""

    def __init__(self) -> None:
        self.codes: dict[str, str | None] = {}
        super().__init__()

    def __setitem__(self, name: str, preset: Preset) -> None:
        self.enter(name, preset, hash_of(preset))

    def enter(self, name: str, preset: Preset, code: str | None) -> None:
        """Register a preset whose hash is known, as in a worker process that receives it."""
        self.data[name], self.codes[name] = preset, code


PRESETS = Presets()
"""Presets by name. Add your own with `PRESETS["mine"] = lambda width, steps: Loop(...)`."""


def _find(name: str) -> tuple[Preset, str | None]:
    """A preset by its name or reference, and the hash of its code, which is None for a shipped one."""
    if not isinstance(name, str) or name not in PRESETS:
        if is_reference(name):
            preset, code = find_code(name)
            return _named(preset, name), code
        try:
            point = choose("preset", name, dict.fromkeys(PRESETS) | _installed())
        except ValueError as error:
            raise ValueError(f"{error}; name your own as file.py:function, or --import it") from None
        assert point is not None
        try:
            PRESETS[name] = _named(point.load(), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"the preset {name} of {point.value} does not load ({error}); fix or uninstall it"
            ) from error
    return PRESETS[name], PRESETS.codes[name]


def _installed() -> dict[str, EntryPoint]:
    """The presets of installed packages, which are trusted, since the user installed them."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def names() -> list[str]:
    """The names of all shipped, registered and installed presets.

    >>> "operloop" in names()
    True
    """
    return list(dict.fromkeys([*PRESETS, *_installed()]))


def preset_of(name: str) -> Preset:
    """The preset of a name. Code that only a file names is not run."""
    return _find(name)[0]


def code_of(name: str) -> str | None:
    """The hash of the source of a user's preset; None for a shipped preset, which has `NUMERICS` instead.

    >>> code_of("operloop") is None
    True
    """
    return _find(name)[1]


def options_of(name: str) -> list[str]:
    """The names of a preset's options."""
    parameters = signature_of(preset_of(name)).parameters
    return [option for option in parameters if option not in ("width", "steps")]


def build(name: str, *, width: int, steps: int, **options: Any) -> Loop:
    """Build the preset `name` for inputs of `width`, looped `steps` times; your own may be `file.py:function`.

    >>> build("vanilla", width=8, steps=3).name
    'vanilla'
    """
    allow(name)
    return build_named(name, width=width, steps=steps, **options)


def build_named(name: str, *, width: int, steps: int, **options: Any) -> Loop:
    """`build` for a name that may come from a file: code it names runs only if the caller has allowed it."""
    check_options(name, options, width=width, steps=steps)
    preset = preset_of(name)
    try:
        signature_of(preset).bind(width, steps, **options)
    except TypeError as error:
        raise ValueError(f"the preset {name} must take a width and a number of steps: {error}") from None
    loop = preset(width, steps, **options)
    require(f"what the preset {name} returns", loop, Loop)
    if (loop.width, loop.steps) != (width, steps):
        raise ValueError(
            f"the preset {name} was asked for a width of {width} and {steps} steps, and returned a loop of width "
            f"{loop.width} and {loop.steps} steps; it must build what it is asked for"
        )
    return loop


def check_options(name: str, options: Mapping[str, Any], **sizes: int) -> None:
    """Raise a ValueError unless a preset has these options, and their values are of the kind it takes."""
    parameters = signature_of(preset_of(name)).parameters
    known = options_of(name)
    unknown = sorted(set(options) - set(known))
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if unknown and not takes_any:
        listed = f"its options are {', '.join(known)}" if known else "it has no options"
        raise ValueError(f"{name} has no option {', '.join(map(repr, unknown))}; {listed}")
    for key, value in {**sizes, "streams": options.get("streams", 1)}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} must be a whole number of at least 1, got {value!r}")
    for key in sorted(options.keys() & parameters.keys()):
        _check_option(name, parameters[key], options[key])


KINDS: dict[str, tuple[type, str]] = {
    "bool": (bool, "true or false"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "None": (type(None), "none"),
}
"""What an option's annotation says of its value; the preset itself checks words and everything else."""


def _check_option(preset: str, option: inspect.Parameter, value: Any) -> None:
    # Values from recipes and --set arrive as written, and the text "False" would otherwise count as true.
    given = option.annotation if isinstance(option.annotation, str) else inspect.formatannotation(option.annotation)
    if not KINDS.keys() >= set(given.split(" | ")):
        return
    kinds = [KINDS[word] for word in given.split(" | ")]
    if not any(isinstance(value, kind) and (kind is bool) == isinstance(value, bool) for kind, _ in kinds):
        wanted = " or ".join(words for _, words in kinds)
        raise ValueError(f"{option.name} of {preset} must be {wanted}, got {value!r}")


def register(preset: Preset) -> Preset:
    """Register a preset under its function's name; name and docstring become the loop's name and summary."""
    PRESETS[preset.__name__] = named = _named(preset, preset.__name__)
    return named


def _named(preset: Preset, name: str) -> Preset:
    """A preset whose loops get its name, with the first paragraph of its docstring as their summary."""

    @functools.wraps(preset)
    def named(*args: Any, **options: Any) -> Loop:
        loop = preset(*args, **options)
        require(f"what the preset {name} returns", loop, Loop)
        loop.name, loop.summary = name, inspect.cleandoc(preset.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        return loop

    return named
