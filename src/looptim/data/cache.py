"""The cache folder: what is in it is complete or absent, however a process ends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.files import sync

_ELSEWHERE = "make room or access there, or set data.cache or $LOOPTIM_CACHE to another folder"


def cache_folder(given: str | None) -> Path:
    """The folder to cache in, made if need be: the one given, $LOOPTIM_CACHE or ~/.cache/looptim."""
    folder = Path(given or os.environ.get("LOOPTIM_CACHE") or "~/.cache/looptim").expanduser()
    with worded(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Asked now, by doing it: not after an hour of tokenising.
        probe = folder / f".probe.{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    return folder


def digest(value: Any) -> str:
    """A hash of anything JSON can write."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


@contextlib.contextmanager
def worded(folder: Path, way_out: str = _ELSEWHERE) -> Iterator[None]:
    """An OSError from inside becomes one sentence with a way out."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"the folder {str(folder)!r} cannot be written ({reason}); {way_out}") from error


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` when all went well and disappears otherwise.

    Several processes may build the same folder: the first to finish wins and the others drop theirs.
    """
    aside = _aside(folder)
    with worded(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        aside.mkdir()
        try:
            yield aside
            for file in aside.iterdir():
                sync(file)
            sync(aside)
            try:
                os.rename(aside, folder)
            except OSError:
                if not folder.is_dir():
                    raise
            sync(folder.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}")


def _sweep(folder: Path) -> None:
    """Removes what processes of this machine left behind when they were killed while building `folder`."""
    for left in folder.parent.glob(f".{folder.name}.{socket.gethostname()}.*"):
        if not _alive(int(left.name.split(".")[-2])):
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
