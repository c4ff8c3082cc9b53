"""Files and folders that are complete or absent, however a process ends, and system errors as one sentence."""

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
    """Another process is working in the folder."""


@contextlib.contextmanager
def os_errors_as(what: str, way_out: str) -> Iterator[None]:
    """Turn an OSError into one sentence: what was tried, why the system refused, and what to do.

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
    """Write a file aside, sync it, and rename it, so that a reader finds the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _aside(path) as aside:
        _write(aside, content)
        aside.replace(path)
        sync(path.parent)


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files aside before the first one is renamed into `folder`; the last one is renamed last.

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
    """A temporary folder that becomes `path` if all goes well and is deleted otherwise.

    Several processes may make the same folder. The first to finish wins and the others drop theirs, unless `replace`
    says to replace what is there. Processes that write one folder together agree on the name `aside`.
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
    """A temporary folder beside `path`; if the process is killed, the next one deletes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _aside(path, aside) as folder:
        folder.mkdir()
        yield folder


def remove_whole(path: Path) -> None:
    """Delete a folder so that a kill halfway leaves nothing that looks complete."""
    with _aside(path) as aside:
        path.rename(aside)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk where the system supports it."""
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
    """A free name beside `path`. Whatever has this name at the end is deleted, and so is what killed processes left."""
    for left in path.parent.glob(f".{path.name}.*.partial"):
        _sweep(left)
    aside = given or aside_name(path)
    _delete(aside)
    try:
        yield aside
    finally:
        _delete(aside)


def aside_name(path: Path) -> Path:
    """A free name beside `path` that tells `sweep` which process made it."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.partial")


def sweep(folder: Path) -> None:
    """Delete what killed processes of this machine left anywhere in a folder."""
    for left in [*folder.rglob(".*.partial")]:
        _sweep(left)


def _sweep(left: Path) -> None:
    """Delete a path made by `_aside` if the process that made it no longer exists."""
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
        # The process exists and belongs to another user.
        pass
    return True


def check_writable(folder: Path) -> None:
    """Check that a folder, or its nearest existing parent, is writable before hours of work go into it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to {folder}: {there} is not a folder you may write to; choose another --out")


def check_links(root: Path, folders: Iterable[Path]) -> None:
    """Check that no link in any of `folders` leads out of `root`; somebody may have planted it."""
    here, folders = root.resolve(), list(folders)
    for path in _in(folders):
        if path.is_symlink() and not path.resolve().is_relative_to(here):
            raise ValueError(f"{path} is a link that leads out of {root}; remove or replace it")
    check_files(folders)


def check_files(folders: Iterable[Path]) -> None:
    """Check that all in `folders` are files and folders; who opens a pipe that somebody planted waits forever."""
    for path in _in(folders):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is neither a file nor a folder; remove it")


def _in(folders: Iterable[Path]) -> Iterator[Path]:
    return (path for folder in folders if folder.is_dir() for path in folder.iterdir())


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder while working in it; a second process gets a HeldError."""
    with os_errors_as(f"cannot write to {folder}", "choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
        # If the lock were a link, opening it would truncate the file that the link points to.
        lock = os.fdopen(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "w")
    with lock:
        if not _lock(lock.fileno()):
            raise HeldError(f"another process is at work in {folder}; stop it, or choose another --out")
        yield


@final
class Place:
    """The identity of a folder, to check later that its path still leads to it.

    >>> Place(Path(".")).check()
    """

    def __init__(self, folder: Path):
        self.folder, self.found = folder, _identity(folder)

    def check(self) -> None:
        """Raise a ValueError if the path leads to another folder or to nothing."""
        if _identity(self.folder) != self.found:
            raise ValueError(
                f"{self.folder} was renamed or replaced during the training, so nothing more is written to it; "
                "--resume the run where it is now"
            )


def _identity(folder: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = folder.stat()
        return found.st_dev, found.st_ino


def _lock(file: int) -> bool:
    """Take the lock, which the system releases when the process ends. True also where locks are not available."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        # Windows has no fcntl, and some cluster file systems have no locks.
        pass
    return True
