"""The run directory: whose it is, what a run records of itself, and that only one process trains into it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .base.files import write_whole
from .config import Config
from .data import Tokenizer
from .recipe import load_config


class HeldError(ValueError):
    """Another process is at work in the folder."""


def check(folder: Path, config: Config, *, resume: bool, force: bool) -> None:
    """Whether a run directory can be this config's; nothing is written."""
    check_writable(folder)
    written = folder / "config.toml"
    if not resume and (written.is_file() or any(folder.glob("checkpoints/step_*"))):
        raise ValueError(f"{folder} already holds a run; add --resume to continue it, or choose another --out")
    changes = difference(load_config(written), config) if written.is_file() else []
    if changes and not force:
        raise ValueError(f"the config of {folder} has changed ({'; '.join(changes)}); undo that, or add --force")


def check_writable(folder: Path) -> None:
    """Asked before hours are spent on data that a run directory is for."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to {folder}: {there} is no folder we may write to; choose another --out")


def difference(old: Config, new: Config) -> list[str]:
    """What differs between two configs, as `key: old -> new`."""

    def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from flat(inner, f"{key}.{name}" if key else name)
        else:
            yield key, value

    before, after = dict(flat(old.model_dump())), dict(flat(new.model_dump()))
    keys = sorted(before.keys() | after.keys())
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in keys if before.get(k) != after.get(k)]


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the run directory while training into it; another process that wants it is told so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another --out") from None
    with lock:
        if not _lock(lock):
            raise HeldError(f"another process is at work in {folder}; stop it, or choose another --out")
        yield


def _lock(file: Any) -> bool:
    """Take the lock, which the system gives back when the process ends, however it ends; True where there are none."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks, as some clusters have.
        return True
    return True


def record(folder: Path, config: Config, environment: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write what a run says of itself; config.toml comes last, since it is what makes the folder a run."""
    try:
        tokenizer.save(folder / "tokenizer")
        write_whole(folder / "env.json", json.dumps(environment, indent=2))
        write_whole(folder / "config.toml", config.to_toml())
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; make room, or choose another --out") from None
