"""Runs a program that nobody has read, in a process of its own; this file is also that process.

It has a time, memory and file-size limit, an empty folder to work in, no environment, and no network where the system
allows it. It can still read the files its user can read: docs/evaluation.md says what is and is not isolated.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

GRACE = 10.0
"""Seconds a process has besides its program's, to start on a busy machine."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 3.0
    """Of wall time, from its first line on; the code_eval metric's."""
    memory: int = 1 << 30
    """Bytes of address space."""
    file_size: int = 1 << 20
    """Bytes of any file it writes."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    passed: bool
    network: bool
    """Whether it could have reached the network."""
    reason: str


def run_program(program: str, limits: Limits | None = None) -> Outcome:
    """Whether a program runs to its end without an exception.

    >>> run_program("assert 1 + 1 == 2").passed, run_program("raise SystemExit(0)").passed
    (True, False)
    """
    if os.name != "posix":
        raise ValueError("programs written by a model are run on POSIX systems only, where a process can be limited")
    limits = limits or Limits()
    token = secrets.token_hex(16)
    job = json.dumps({"program": program, "token": token, **asdict(limits)})
    with tempfile.TemporaryDirectory(prefix="looptim-code-") as folder:
        child = subprocess.Popen(
            # Isolated: no PYTHON* variables, no user site, nothing of the folder it runs in.
            [sys.executable, "-I", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            # The child's own alarm comes first; this one is for a program that has taken it off.
            out, _ = child.communicate(job.encode(), timeout=limits.seconds + GRACE)
            reason = f"ended with status {child.returncode}"
        except subprocess.TimeoutExpired as error:
            out, reason = error.stdout or b"", "was killed"
        finally:
            _kill_session(child)
    lines = out.decode(errors="replace").splitlines()
    passed = lines[1:2] == [token]
    if child.returncode == -signal.SIGALRM:
        reason = f"took longer than {limits.seconds:g} s"
    return Outcome(passed, lines[:1] != ["no network"], "passed" if passed else reason)


def _kill_session(child: subprocess.Popen) -> None:
    """The child and what it has started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        child.kill()
    child.wait()


@final
class CodeEval:
    """What stands in for the `code_eval` metric of the stock tasks: the same numbers, from limited processes."""

    name = "code_eval"

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self.network = False
        """Whether any program could have reached the network."""
        self.count = 0

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,), **ignored: Any
    ) -> tuple[dict[str, float], dict[int, list[Outcome]]]:
        """pass@k over problems, each of a test and candidates, and how every program ended."""
        outcomes = {
            index: [run_program(f"{candidate}\n{test}", self.limits) for candidate in candidates]
            for index, (test, candidates) in enumerate(zip(references, predictions, strict=True))
        }
        everything = [outcome for row in outcomes.values() for outcome in row]
        self.network |= any(outcome.network for outcome in everything)
        self.count += len(everything)
        numbers = [(len(row), sum(outcome.passed for outcome in row)) for row in outcomes.values()]
        scores = {
            f"pass@{wanted}": sum(pass_at_k(tried, right, wanted) for tried, right in numbers) / len(numbers)
            for wanted in k
            if all(tried >= wanted for tried, _ in numbers)
        }
        return scores, outcomes

    def describe(self) -> dict[str, Any]:
        """For the record of a result."""
        return {**asdict(self.limits), "network": self.network, "programs": self.count}


def pass_at_k(tried: int, right: int, k: int) -> float:
    """The chance that one of `k` of the tried programs is right, `1 - C(n - c, k) / C(n, k)`.

    >>> pass_at_k(4, 2, 1)
    0.5
    """
    return 1.0 if tried - right < k else 1.0 - math.comb(tried - right, k) / math.comb(tried, k)


def _leave_network() -> bool:
    """Whether this process now has a network namespace of its own, in which there is nothing."""
    new_user, new_network = 0x10000000, 0x40000000
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    return unshare is not None and (unshare(new_network) == 0 or unshare(new_user | new_network) == 0)


def _limit(job: dict[str, Any]) -> None:
    import resource

    def at_most(kind: int, value: int) -> None:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_FSIZE, job["file_size"])
    at_most(resource.RLIMIT_NOFILE, 64)
    at_most(resource.RLIMIT_CPU, math.ceil(job["seconds"]) + 1)
    # No process or thread besides this one; root is not bound by it.
    at_most(resource.RLIMIT_NPROC, 0)
    # macOS knows the limit and refuses it.
    if sys.platform != "darwin":
        at_most(resource.RLIMIT_AS, job["memory"])


def _child() -> None:
    job = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    answers.write("network\n" if not _leave_network() else "no network\n")
    answers.flush()
    _limit(job)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    token = job.pop("token")
    # As code_eval does: without what this file imports from __future__, and not as a main program.
    exec(compile(job.pop("program"), "<program>", "exec", dont_inherit=True), {})
    # Leaving early, with whatever status, is not passing. A program that looks for the word in our frame finds it:
    # this is no judge of a model that means to cheat.
    answers.write(token + "\n")
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    _child()
