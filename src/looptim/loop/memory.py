"""What a module could remember: all that its attributes, classes, functions, closures and globals hold."""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..base.source import OURS, is_loose, scope_of


def state_of(module: nn.Module) -> dict[tuple[str, ...], Any]:
    """A copy of what a module's parts, their classes and hooks, and the functions that these use, hold."""
    found: dict[tuple[str, ...], Any] = {}
    copies: dict[int, Any] = {}

    def copy_of(value: Any) -> Any:
        # Functions of a module share what they use.
        if id(value) not in copies:
            copies[id(value)] = _frozen(value)
        return copies[id(value)]

    for path, part in module.named_modules():
        kind = type(part)
        theirs = [cls for cls in kind.__mro__ if not _is_of_library(cls)]
        owned = {k: v for cls in kind.__mro__ for k, v in vars(cls).items() if isinstance(v, int | float | Tensor)}
        for cls in reversed(theirs):
            owned |= {k: v for k, v in vars(cls).items() if k[:2] != "__"}
        owned |= _attributes_of(part)
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        used = [hook for each in hooks for hook in each.values()]
        found |= {(path, f"{kind.__name__}.{key}"): copy_of(value) for key, value in owned.items()}
        for place, named in enumerate(_named_by([*used, *owned.values(), *([kind.forward] if theirs else [])])):
            found |= {(path, str(place), f"{kind.__name__}.{key}"): copy_of(value) for key, value in named.items()}
    return found


def find_memory(before: dict[tuple[str, ...], Any], after: dict[tuple[str, ...], Any]) -> tuple[str | None, float]:
    """The name of something that a forward or backward pass has changed."""
    for name in before.keys() | after.keys():
        if not _is_same(before.get(name), after.get(name)):
            return f"{name[-1]}, which remembers earlier calls,", float("inf")
    return None, 0.0


TORCHS_OWN = vars(nn.Module()).keys()


def _attributes_of(part: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(part).items() if k not in TORCHS_OWN} | part._buffers | part._parameters


def _named_by(made: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """What each function uses from outside, has as defaults or attributes, and so on for the functions among that."""
    functions = list(dict.fromkeys(f for each in made for f in _functions_of(each)))
    for function in functions:
        held = {"defaults": function.__defaults__, "options": function.__kwdefaults__, "attributes": vars(function)}
        scope = scope_of(function) | {f"{function.__name__}'s {k}": v for k, v in held.items() if v}
        yield scope
        functions += [f for each in scope.values() for f in _functions_of(each) if f not in functions]


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The functions of a user that are in a value: itself, what it wraps, or the methods of its class."""
    value = value.fget if isinstance(value, property) else value
    value = value.func if isinstance(value, functools.partial) else inspect.unwrap(value) if callable(value) else value
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        yield from () if _is_of_library(value) else [value]
        return
    kind = value if isinstance(value, type) else type(value)
    if not _is_of_library(kind) and is_loose(kind.__module__.partition(".")[0]):
        yield from (each for each in vars(kind).values() if isinstance(each, types.FunctionType))


def _is_of_library(made: Any) -> bool:
    """Whether a function or class belongs to torch or looptim, which remember nothing."""
    return str(made.__module__).partition(".")[0] in ("torch", OURS, "builtins")


def _frozen(value: Any, depth: int = 6) -> Any:
    """A copy of data that may be nested; what holds none is returned as it is."""
    inner = functools.partial(_frozen, depth=depth - 1)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if depth == 0 or isinstance(value, str | bytes | int | float | complex | types.FunctionType | None):
        return value
    if isinstance(value, Mapping):
        return {key: inner(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [inner(each) for each in value]
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if hasattr(value, "__array__") and not isinstance(value, type):
        return inner(value.tolist())
    return [type(value), inner(_inside(value))]


def _inside(value: Any) -> Any:
    """What an object holds."""
    if isinstance(value, types.ModuleType):
        return _variables_of(value)
    if isinstance(value, type):
        return {} if _is_of_library(value) else {k: v for k, v in vars(value).items() if k[:2] != "__"}
    if isinstance(value, nn.Module):
        return _attributes_of(value) | value._modules
    if isinstance(value, types.GeneratorType):
        return value.gi_frame and [value.gi_frame.f_lasti, value.gi_frame.f_locals]
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, contextvars.ContextVar):
        return value.get(None)
    if isinstance(value, memoryview):
        return value.tobytes()
    if isinstance(value, functools._lru_cache_wrapper):
        # Hits are counted for parts that compute a table once, too.
        return value.cache_info().misses
    try:
        # Iterators and generators of random numbers, which have no attributes, say by this what they hold.
        made = value.__reduce_ex__(4)
    except Exception:
        return getattr(value, "__dict__", repr(value))
    return made if isinstance(made, str) else list(made[1:3])


REMEMBERED: dict[str, Callable[[Any], Any]] = {
    "os": lambda os: dict(os.environ),
    "random": lambda random: random.getstate(),
    "numpy": lambda numpy: numpy.random.get_state(),
    "numpy.random": lambda random: random.get_state(),
}
"""Libraries that remember something for everybody."""


def _variables_of(module: types.ModuleType) -> dict[str, Any]:
    """The variables of a module: of a user's all that are data, of a library's the numbers, and what it remembers."""
    if module.__name__ in REMEMBERED:
        return {"state": REMEMBERED[module.__name__](module)}
    top = module.__name__.partition(".")[0]
    if top in ("torch", OURS):
        return {}
    kinds = (int, float, complex, Tensor) + ((list, dict, set, deque) if is_loose(top) else ())
    return {key: value for key, value in vars(module).items() if key[:2] != "__" and isinstance(value, kinds)}


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        # NaN is not equal to itself.
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(each, b[key]) for key, each in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a is b or (type(a) is type(b) and bool(a == b))
