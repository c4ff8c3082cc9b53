"""Files and folders that are complete or absent, however a process ends; errors of the system in one sentence."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import final


class HeldError(ValueError):
    """Another process is at work in the folder."""


@contextlib.contextmanager
def os_errors_as(what: str, way_out: str) -> Iterator[None]:
    """Turn an OSError from inside into one sentence: what was tried, why the system refused it, what to do.

    >>> with os_errors_as("cannot read the recipe", "give another"):
    ...     open("/nowhere")
    Traceback (most recent call last):
    ValueError: cannot read the recipe: No such file or directory; give another
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror or error}; {way_out}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file aside, sync it and rename it: a reader finds the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _aside(path) as aside:
        _write(aside, content)
        aside.replace(path)
        sync(path.parent)


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files aside before the first is renamed into `folder`; the last one is renamed last.

    If one of them cannot be written, nothing has changed.
    """
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _aside(folder / "files") as aside:
            aside.mkdir()
            for name, content in files.items():
                _write(aside / name, content)
            for name in files:
                (aside / name).replace(folder / name)
            sync(folder)
    except BaseException:
        if created:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def whole_folder(path: Path, *, replace: bool = False, aside: Path | None = None) -> Iterator[Path]:
    """A folder to write into, which becomes `path` when all went well and disappears otherwise.

    Several processes may make the same folder: the first to finish wins and the others drop theirs, unless theirs is to
    `replace` what is there. Processes that write one folder together agree on its name `aside`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _aside(path, aside) as folder:
        folder.mkdir()
        yield folder
        for inner in [*folder.rglob("*"), folder]:
            sync(inner)
        if replace and path.exists():
            with _aside(path) as before:
                path.rename(before)
                folder.rename(path)
        else:
            try:
                folder.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
        sync(path.parent)


@contextlib.contextmanager
def scratch_folder(path: Path, *, aside: Path | None = None) -> Iterator[Path]:
    """A folder beside `path` that is gone in the end; what a killed process leaves of it, the next one sweeps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _aside(path, aside) as folder:
        folder.mkdir()
        yield folder


def remove_whole(path: Path) -> None:
    """Delete a folder so that a kill in between leaves none that looks complete."""
    with _aside(path) as aside:
        path.rename(aside)


def sync(path: Path) -> None:
    """Bring a file's content, or the names in a folder, onto the disk, where the system can."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(path)


@contextlib.contextmanager
def _aside(path: Path, given: Path | None = None) -> Iterator[Path]:
    """A free name beside `path`; whatever has it in the end is deleted, and so is what killed processes left."""
    for left in path.parent.glob(f".{path.name}.*.partial"):
        _sweep(left)
    aside = given or aside_name(path)
    _delete(aside)
    try:
        yield aside
    finally:
        _delete(aside)


def aside_name(path: Path) -> Path:
    """A free name beside `path`, by which `sweep` knows whose it is."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.partial")


def sweep(folder: Path) -> None:
    """Delete what killed processes of this machine left anywhere in a folder."""
    for left in [*folder.rglob(".*.partial")]:
        _sweep(left)


def _sweep(left: Path) -> None:
    """Delete what has a name of `_aside`, if the process that gave it one is no more."""
    made = re.fullmatch(rf"\..+\.{re.escape(socket.gethostname())}\.(\d+)\.[0-9a-f]{{8}}\.partial", left.name)
    if made and not _alive(int(made[1])):
        _delete(left)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process exists and belongs to somebody else.
        pass
    return True


def check_writable(folder: Path) -> None:
    """That a folder, or the nearest one above it, can be written to: asked before hours go into what it is for."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to {folder}: {there} is no folder we may write to; choose another --out")


def check_links(root: Path, folders: Iterable[Path]) -> None:
    """That no link in any of `folders` leads out of `root`: somebody may have made it for others to write through."""
    here = root.resolve()
    for folder in folders:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_symlink() and not path.resolve().is_relative_to(here):
                raise ValueError(f"{path} is a link that leads out of {root}; remove it, or put there what it names")


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a folder while working in it; another process that wants it is told so."""
    with os_errors_as(f"cannot write to {folder}", "choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
        # A link there would be somebody's who wants the file it leads to emptied.
        lock = os.fdopen(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "w")
    with lock:
        if not _lock(lock.fileno()):
            raise HeldError(f"another process is at work in {folder}; stop it, or choose another --out")
        yield


@final
class Place:
    """Where a folder is now, to see later whether its path still leads there.

    >>> Place(Path(".")).check()
    """

    def __init__(self, folder: Path):
        self.folder, self.found = folder, _identity(folder)

    def check(self) -> None:
        """A ValueError if the path leads elsewhere, or nowhere."""
        if _identity(self.folder) != self.found:
            raise ValueError(
                f"{self.folder} was renamed or replaced while it was trained into, and is left alone; "
                "--resume the run where it is now"
            )


def _identity(folder: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = folder.stat()
        return found.st_dev, found.st_ino


def _lock(file: int) -> bool:
    """Take the lock, which the system gives back when the process ends; True where there are no locks to be had."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        # Windows has no fcntl, and the file systems of some clusters no locks.
        pass
    return True
