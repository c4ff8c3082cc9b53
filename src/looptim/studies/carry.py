"""Presets of one's own in worker processes: they travel as values, from whatever script, notebook or file."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import PathFinder
from typing import ParamSpec, TypeVar

import cloudpickle

from ..loop.registry import PRESETS, code_of, preset_of

P = ParamSpec("P")
T = TypeVar("T")


def without_main(spawn: Callable[P, T]) -> Callable[P, T]:
    """With `spawn`, processes do not run the caller's script again, which would start the study in each of them."""

    def hidden(*args: P.args, **kwargs: P.kwargs) -> T:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return spawn(*args, **kwargs)
        finally:
            sys.modules["__main__"] = main

    return hidden


def pack(names: Iterable[str]) -> bytes:
    """Pack the presets of these names and all others the user registered, since one may build on another."""
    own = {name: preset_of(name) for name in dict.fromkeys([*names, *PRESETS]) if code_of(name) is not None}
    with ExitStack() as stack:
        for module in filter(None, (sys.modules.get(preset.__module__) for preset in own.values())):
            # A module loaded from a file path cannot be imported by name.
            if "." not in module.__name__ and PathFinder.find_spec(module.__name__) is None:
                stack.enter_context(_by_value(module))
        try:
            return cloudpickle.dumps({name: (preset, code_of(name)) for name, preset in own.items()})
        except Exception as error:
            # Objects that cannot be pickled raise all kinds of errors.
            raise ValueError(
                f"the presets {', '.join(own)} cannot be sent to workers ({error}); remove what cannot be pickled"
            ) from error


def unpack(packed: bytes) -> None:
    """Register what `pack` has packed, under the original hashes."""
    try:
        for name, (preset, code) in cloudpickle.loads(packed).items():
            PRESETS.enter(name, preset, code)
    except ImportError as error:
        raise ValueError(f"a worker cannot import what a preset needs ({error}); install it") from error


@contextmanager
def _by_value(module: types.ModuleType) -> Iterator[None]:
    before = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if not before:
            cloudpickle.unregister_pickle_by_value(module)
