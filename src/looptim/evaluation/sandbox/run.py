"""Starts the two processes of a program and its judge, watches them, and clears away what they leave."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from .confine import CONTAINED

GRACE = 20.0
"""Seconds the processes have to start, on a busy machine, before the program's time begins."""
_LOOK = 0.05
"""Seconds between two looks at how much a program has written."""
_START = "import sys; sys.path.insert(0, sys.argv.pop()); from sandbox.worker import main; main()"


@dataclass(frozen=True)
class Limits:
    """What a program may use, and its test likewise."""

    seconds: float = 3.0
    """Of wall time for both, from the program's first line on; the code_eval metric's."""
    memory: int = 1 << 30
    """Bytes of address space."""
    file_size: int = 1 << 20
    """Bytes of any file it writes."""
    disk: int = 1 << 24
    """Bytes of all its files together, looked at twenty times a second."""
    files: int = 1000
    """Files and folders it makes, likewise."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    passed: bool
    reason: str
    isolation: tuple[str, ...]
    """What it was confined by, of limits, namespaces, landlock and seccomp."""


def run_program(program: str, limits: Limits | None = None, *, test: str = "") -> Outcome:
    """Whether a program runs to its end and passes its test, which runs in another process and calls its functions.

    Without a test there is only the program's own word that it came to its end.

    >>> add = "def add(a, b): return a + b"
    >>> run_program(add, test="assert add(1, 2) == 3").passed, run_program(add, test="assert add(1, 2) == 4").passed
    (True, False)
    """
    if os.name != "posix":
        raise ValueError("programs written by a model are run on POSIX systems only, where a process can be limited")
    limits = limits or Limits()
    with _folder() as place, _folder() as other, contextlib.ExitStack() as processes:
        with _pipe() as (their_requests, requests), _pipe() as (answers, their_answers):
            job = {"program": program, "test": test, "limits": asdict(limits)}
            job["descriptors"] = [answers.fileno(), requests.fileno()]
            processes.enter_context(_process("program", place, stdin=their_requests, stdout=their_answers))
            with _file(job) as file:
                judge = _process("judge", other, stdin=file, stdout=subprocess.PIPE, pass_fds=job["descriptors"])
                verdicts = processes.enter_context(judge).stdout
        assert verdicts is not None
        return _follow(verdicts.fileno(), limits, lambda: _check_disk([place, other], limits))


def check_isolation() -> None:
    """A ValueError where this system cannot contain a program."""
    outcome = run_program("def f(): return 1", test="assert f() == 1")
    if lacking := uncontained(outcome.isolation):
        raise ValueError(
            f"this system cannot contain programs that a model writes, for want of {lacking}; use Linux "
            "5.13 or newer, or add --unisolated where nothing can be lost, as in a virtual machine of its own"
        )
    if not outcome.passed:
        raise ValueError(f"programs cannot be run here ({outcome.reason}); leave out the tasks that execute code")


def uncontained(isolation: Iterable[str]) -> str:
    """What of the isolation that contains a program is lacking; empty if nothing is.

    >>> uncontained(["limits", "namespaces", "landlock"])
    'seccomp'
    """
    return " and ".join(sorted(CONTAINED - set(isolation)))


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The reading and the writing end."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as output, os.fdopen(writing, "wb", 0) as input:
        yield output, input


@contextlib.contextmanager
def _file(job: dict[str, Any]) -> Iterator[IO[bytes]]:
    """A message as a file, since a pipe might be full before anybody reads it."""
    data = json.dumps(job).encode()
    with tempfile.TemporaryFile() as file:
        file.write(len(data).to_bytes(8, "big") + data)
        file.seek(0)
        yield file


@contextlib.contextmanager
def _process(role: str, folder: Path, **streams: Any) -> Iterator[subprocess.Popen[Any]]:
    """A worker in a folder, which is killed in the end."""
    process = subprocess.Popen(
        # Isolated: no PYTHON* variables, no user site, nothing of the folder it runs in.
        [sys.executable, "-I", "-c", _START, role, str(Path(__file__).parents[1])],
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        **streams,
    )
    with process:
        try:
            yield process
        finally:
            # With it goes what it could have started where nothing keeps it from that.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()


class _FullError(Exception):
    """A program has written more than it may."""


def _follow(verdicts: int, limits: Limits, watch: Callable[[], None]) -> Outcome:
    """Wait for what the judge says: how the two are confined, then what is wrong with the program, if anything."""
    isolation: tuple[str, ...] = ()
    try:
        isolation = tuple(_hear(verdicts, GRACE, watch))
        reason = str(_hear(verdicts, limits.seconds, watch))
    except TimeoutError:
        reason = f"took longer than {limits.seconds:g} s" if isolation else f"did not start within {GRACE:g} s"
    except (EOFError, ValueError):
        reason = "its test came to no verdict"
    except _FullError:
        reason = f"wrote more than {limits.disk} bytes or {limits.files} files"
    return Outcome(not reason, reason or "passed", isolation)


def _hear(descriptor: int, seconds: float, watch: Callable[[], None]) -> Any:
    """The next message, which is a short line of JSON."""
    end, line = time.monotonic() + seconds, b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not line.endswith(b"\n"):
        ready = poll.poll(1000 * _LOOK)
        if time.monotonic() > end:
            raise TimeoutError
        if not ready:
            watch()
        elif piece := os.read(descriptor, 1):
            line += piece
            if len(line) > 4096:
                raise ValueError("a judge says little")
        else:
            raise EOFError
    return json.loads(line)


def _check_disk(folders: Sequence[Path], limits: Limits) -> None:
    """That what lies in folders is little; what cannot be counted is too much."""
    size = count = 0
    waiting = [str(folder) for folder in folders]
    try:
        while waiting:
            for entry in os.scandir(waiting.pop()):
                size, count = size + 512 * entry.stat(follow_symlinks=False).st_blocks, count + 1
                if size > limits.disk or count > limits.files:
                    raise _FullError
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    except FileNotFoundError:
        # The program has just removed it.
        pass
    except OSError:
        raise _FullError from None


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """An empty folder, which is removed with whatever is in it in the end, and never with anything else."""
    path = Path(tempfile.mkdtemp(prefix="looptim-code-"))
    # By its number it is the same folder whatever its name has become.
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield path
    finally:
        # What the system refuses to remove, once the processes are gone, stays; the verdict is not lost for it.
        with contextlib.suppress(OSError):
            _empty(handle)
        with contextlib.suppress(OSError):
            path.rmdir()


def _empty(folder: int) -> None:
    """Remove what is in a folder and close it: without recursion or long paths, so that no depth is too deep."""
    names: list[str] = []
    try:
        while True:
            deeper = _remove_simple(folder)
            if deeper is not None:
                names.append(deeper)
                os.chmod(deeper, 0o700, dir_fd=folder)
                folder = _move(folder, deeper)
            elif names:
                folder = _move(folder, "..")
                os.rmdir(names.pop(), dir_fd=folder)
            else:
                return
    finally:
        os.close(folder)


def _remove_simple(folder: int) -> str | None:
    """Remove files and empty folders from a folder, and return the name of one that is not empty."""
    full = None
    for name in os.listdir(folder):
        try:
            if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                os.rmdir(name, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            full = name
    return full


def _move(folder: int, name: str) -> int:
    """Open a neighbor of an open folder in place of it."""
    neighbor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    os.close(folder)
    return neighbor
