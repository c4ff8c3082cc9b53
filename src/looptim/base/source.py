"""Hashes of the code that a function is made of; a result belongs to its code."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

OURS = __name__.partition(".")[0]


def hash_of(function: Callable[..., Any]) -> str | None:
    """A hash of the source that defines a user's function, ignoring comments and layout; None for one of looptim's.

    For a function in a module this is `hash_of_module`, since parts depend on the code around them. For one from a
    notebook or a console, it covers the function and everything it names there.

    >>> hash_of(hash_of) is None
    True
    """
    function, given = inspect.unwrap(function), []
    while isinstance(function, functools.partial):
        given.append(repr((function.args, sorted(function.keywords.items()))))
        function = inspect.unwrap(function.func)
    home = getattr(function, "__module__", None) or ""
    if not given and home.partition(".")[0] == OURS:
        return None
    return _digest([*given, *(_trees(home) or [repr(_made(function, home, set()))])])


def hash_of_module(name: str) -> str | None:
    """A hash of a module's file, ignoring top-level calls and conditions, and of the user's modules that it imports."""
    trees = _trees(name)
    return _digest(trees) if trees else None


def _digest(content: list[str]) -> str:
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def _trees(home: str) -> list[str]:
    """The syntax trees of a module and of the user's modules that it imports; empty if there is no source."""
    found: dict[str, str] = {}
    names = [home]
    while names:
        name = names.pop()
        text = None if name in found or not _is_users(name, home) else _text(name)
        if text is None:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        names += _imported(tree, name)
        tree.body = [part for part in tree.body if not isinstance(part, ast.Expr | ast.If)]
        # What was edited before it was first asked for is in no file any more: then what runs stands for its source.
        edited = name in RUNNING and RUNNING[name].edited
        found[name] = repr(_made(_own(sys.modules[name]), name, set())) if edited else ast.dump(tree)
    return sorted(found.values())


class Running(NamedTuple):
    """What a module is made of, from one import or reload to the next."""

    spec: Any
    text: str
    edited: bool
    """Whether that was no longer what it was imported from."""


RUNNING: dict[str, Running] = {}
"""The user's modules as they were when they were first asked for: an edit does not change what runs."""


def was_edited(name: str) -> bool:
    """Whether the file of a module says something else than what this Python imported from it."""
    running, text = RUNNING.get(name), _text_of_file(name)
    if running is None or text is None:
        return False
    with suppress(SyntaxError):
        return running.edited or ast.dump(ast.parse(text)) != ast.dump(ast.parse(running.text))
    return True


def _is_users(name: str, home: str) -> bool:
    """Whether a module is of the same package as `home`, or not installed."""
    top = name.partition(".")[0]
    return top != OURS and (top == home.partition(".")[0] or is_loose(top))


def _text(name: str) -> str | None:
    """The source of a module, of one that is imported as it was then."""
    module = sys.modules.get(name)
    # A file that a reference names was read once, and that text is what runs.
    if module is None or hasattr(module, "__source__"):
        return getattr(module, "__source__", None) or _text_of_file(name)
    if name not in RUNNING or RUNNING[name].spec is not module.__spec__:
        text = _text_of_file(name)
        if text is None:
            return None
        with suppress(SyntaxError):
            RUNNING[name] = Running(module.__spec__, text, not _is_made_of(module, text))
    return RUNNING[name].text if name in RUNNING else None


def _text_of_file(name: str) -> str | None:
    file = _file(name)
    if file is not None:
        with suppress(OSError, UnicodeDecodeError):
            return file.read_text(encoding="utf-8")
    return None


def _is_made_of(module: types.ModuleType, text: str) -> bool:
    """Whether what a module has of its own is what a source makes; it may still be on its way."""
    if type(getattr(module.__spec__, "loader", None)) is not SourceFileLoader:
        # A script cannot be imported anew, and what rewrites code, as pytest does, makes something else of a source.
        return True
    codes, made = [compile(text, "", "exec")], []
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        made.append((code.co_qualname, _made(code, module.__name__, set())))
    assigned = [(t, part.value) for part in ast.parse(text).body if isinstance(part, ast.Assign) for t in part.targets]
    constants = {t.id: value for t, value in assigned if isinstance(t, ast.Name)}
    has = vars(module)
    return all(
        (each.__code__.co_qualname, _made(each.__code__, module.__name__, set())) in made
        for each in _functions(_own(module))
        if each.__code__.co_filename == module.__file__
    ) and all(has.get(k, v.value) == v.value for k, v in constants.items() if isinstance(v, ast.Constant))


def _own(module: types.ModuleType) -> dict[str, Any]:
    """The functions and classes that a module defines."""
    return {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}


def _functions(scope: dict[str, Any]) -> Iterator[types.FunctionType]:
    """The functions among some values, and the methods of the classes there."""
    for value in scope.values():
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, types.FunctionType):
            yield value
        elif isinstance(value, type):
            yield from (each for each in vars(value).values() if isinstance(each, types.FunctionType))


def _file(name: str) -> Path | None:
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        file = None if spec is None else spec.origin
    return Path(file) if file and file.endswith(".py") else None


def is_loose(top: str) -> bool:
    """Whether a module or package belongs neither to Python nor to an installed distribution."""
    file = _file(top)
    libraries = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return file is not None and not any(file.resolve().is_relative_to(library) for library in libraries)


def _imported(tree: ast.Module, name: str) -> Iterator[str]:
    """The modules that a module may import anywhere in its source, and their parent packages."""
    file = _file(name)
    package = name.split(".") if file is not None and file.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            around = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*around, *filter(None, [node.module])])
            # A name imported from a package may be a module.
            named = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        for each in named:
            yield from accumulate(each.split("."), "{}.{}".format)


SKIPPED = {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__"}
"""Attributes of a class that do not affect what it does."""


def _made(value: Any, home: str, seen: set[int]) -> Any:
    """What Python compiled: the bytecode of functions, classes and objects of `home`, and of everything they name."""
    inner = functools.partial(_made, home=home, seen=seen)
    match value:
        case types.CodeType():
            return [value.co_code.hex(), value.co_names, inner(value.co_consts)]
        case tuple() | list():
            return [inner(each) for each in value]
        case set() | frozenset():
            return sorted(map(repr, value))
        case dict():
            return {repr(key): inner(each) for key, each in sorted(value.items(), key=repr)}
        case property():
            return inner((value.fget, value.fset))
        case staticmethod() | classmethod():
            return inner(value.__func__)
    if getattr(value, "__module__", None) == home and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            return inner([value.__code__, value.__defaults__, value.__kwdefaults__, scope_of(value)])
        if isinstance(value, type):
            return inner([value.__bases__, {name: each for name, each in vars(value).items() if name not in SKIPPED}])
        return inner([type(value), getattr(value, "__dict__", repr(value))])
    if isinstance(value, types.ModuleType | types.FunctionType | type):
        origin = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        return [value.__name__, *(_trees(origin) if origin not in (None, home) else [])]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def scope_of(function: types.FunctionType) -> dict[str, Any]:
    """What a function, and functions nested in it, use from the scopes around them."""
    scope: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # A cell is empty until its name is defined.
        with suppress(ValueError):
            scope[name] = cell.cell_contents
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        scope |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return scope
