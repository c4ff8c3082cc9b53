"""Code that is named as `module:function` or `file.py:function`; it runs only if the caller named it.

Code that a file names (a recipe, a study, the config of a run) is what the author of that file wants to run, which need
not be what the person who opens it wants.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .choices import choose
from .source import hash_of_module, was_edited

EVERYTHING = "*"


class Loaded(NamedTuple):
    """A module as it was when it was imported."""

    module: types.ModuleType
    code: str | None
    """The hash of its source."""


ALLOWED: dict[str, Loaded | None] = {}
"""Modules, and files by their absolute paths, that the caller has named; the value is None until they are imported.

If `EVERYTHING` is among the keys, whatever a file names is run.
"""


def is_reference(name: object) -> bool:
    """Whether a name says where its code is.

    >>> is_reference("my.py:mine"), is_reference("package.module:mine"), is_reference("operloop")
    (True, True, False)
    """
    place, _, function = str(name).rpartition(":")
    return bool(place) and function.isidentifier()


def allow(name: str) -> None:
    """Let the code of a reference run because the caller gave it; a plain name needs no permission.

    A module that was edited since it was imported is imported again.
    """
    if is_reference(name):
        ALLOWED[_whole(name.rpartition(":")[0])] = None


def import_code(place: str | Path) -> None:
    """Run a module or a file of yours for the presets it registers, and allow files to name what is in it.

    A recipe, a study or a run that names `my.py:mine` is refused until `import_code("my.py")`, which is what `--import
    my.py` does on the command line. `import_code("package")` allows all modules of the package.
    """
    whole = _whole(str(place))
    ALLOWED[whole] = _load(whole)


def find_code(reference: str) -> tuple[Callable[..., Any], str | None]:
    """The function that a reference names and the hash of its source; a ValueError unless the caller allowed it."""
    place, _, function = reference.rpartition(":")
    whole = _allowed(_whole(place))
    if whole is None:
        raise ValueError(
            f"{reference} is code that a file asks for, and it was not run; if you trust it, allow it with --import "
            f"{place} or --trust-code (in Python, looptim.import_code({place!r}))"
        )
    loaded = ALLOWED.get(whole) or _load(whole)
    ALLOWED[whole] = loaded
    known = {name: value for name, value in vars(loaded.module).items() if callable(value) and name[0] != "_"}
    return choose(f"function of {place}", function, known), loaded.code


def _whole(place: str) -> str:
    """The absolute path of a file, or the name of a module."""
    return str(Path(place).resolve()) if place.endswith(".py") or os.sep in place else place


def _allowed(whole: str) -> str | None:
    """The allowed entry for a name, if any. A moved file is recognized by its name if no other entry has it."""
    if whole in ALLOWED or EVERYTHING in ALLOWED:
        return whole
    if whole.endswith(".py"):
        same = [place for place in ALLOWED if place.endswith(".py") and Path(place).name == Path(whole).name]
        return same[0] if len(same) == 1 else None
    return whole if any(whole.startswith(f"{place}.") for place in ALLOWED) else None


def _load(whole: str) -> Loaded:
    """Import a file or a module; any failure becomes one sentence."""
    is_file = whole.endswith(".py")
    # Folders are appended, so that a file beside the user's cannot shadow a library.
    folder = str(Path(whole).parent if is_file else Path.cwd())
    sys.path += [] if folder in sys.path else [folder]
    try:
        module = _run_file(Path(whole)) if is_file else importlib.import_module(whole)
    except (Exception, SystemExit) as error:
        if isinstance(error, FileNotFoundError) and error.filename == whole:
            raise ValueError(f"there is no file {whole}; give its full path") from None
        if isinstance(error, ModuleNotFoundError) and whole.startswith(error.name or whole + "."):
            raise ValueError(f"there is no module {whole!r}; give one that Python finds, or a file.py") from None
        at = [] if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f", {frame.filename}, line {frame.lineno}" for frame in at)
        raise ValueError(f"{whole} cannot be run ({type(error).__name__}: {error}{where}); fix it") from error
    code = hash_of_module(module.__name__)
    if was_edited(module.__name__):
        print(f"{whole} was edited since Python imported it, and the old one runs; restart Python", file=sys.stderr)
    return Loaded(module, code)


def _run_file(path: Path) -> types.ModuleType:
    text = path.read_text(encoding="utf-8")
    # The name contains a hash of the content, so an edited file is a new module, and files of equal names do not clash.
    name = f"{path.stem}_{hashlib.sha256(f'{path}{text}'.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    vars(module)["__source__"] = text
    sys.modules[name] = module
    try:
        exec(compile(text, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module
