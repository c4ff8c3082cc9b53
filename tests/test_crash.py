"""Killed before any of its file operations, every verb ends as if it had not been, and leaves nothing behind.

An audit hook sees each file that is opened for writing, renamed or deleted, and kills the process before the one that
is asked for. One warm process forks those that die and those that go on after them.
"""

import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from support import config, losses

import looptim as lo

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move"}


def train(folder: Path) -> None:
    """Packing, training, checkpoints, and what is pruned of them."""
    data = {"source": str(folder.parent / "text.txt"), "options": {}, "tokenizer": "bytes", "valid_fraction": 0.2}
    data["cache"] = str(folder / "cache")
    lo.train(config(data=data, steps=3, valid_every=3, checkpoint_every=1), folder / "run", resume=True, progress=False)


def export(folder: Path) -> None:
    lo.export(folder / "run")


def report(folder: Path) -> None:
    lo.report(folder / "run", out=folder / "report")


def train_task(folder: Path) -> None:
    lo.train(config(steps=3, valid_every=3), folder / "run", progress=False)


STORIES: dict[str, Callable[[Path], None]] = {
    "train": train,
    "export": export,
    "report": report,
}


def fork(story: Callable[[Path], None], folder: Path, die_before: int | None = None) -> int:
    """Run a story in a child that dies before its file operation of that number; how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done = 0

    def watch(event, arguments):
        nonlocal done
        changes = event in CHANGES or (event == "open" and arguments[2] & WRITES)
        if changes and str(arguments[0]).startswith(str(folder)):
            if done == die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1

    sys.addaudithook(watch)
    try:
        story(folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def outcome(folder: Path) -> tuple:
    """What is to be the same: which files there are, and every loss to the last bit."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return names, losses(folder / "run"), losses(folder / "run", "valid_loss"), losses(folder / "run", "tokens")


def matrix(name: str, root: Path, first: int, stride: int) -> int:
    """Kill a story before every `stride`-th of its operations; how often."""
    story, straight, start = STORIES[name], root / "straight", root / "start"
    (root / "text.txt").write_text("".join(f"line {n} of {n * n}\n" for n in range(600)))
    start.mkdir()
    if name != "train":
        assert fork(train_task, start) == 0
    shutil.copytree(start, straight)
    assert fork(story, straight) == 0
    kills = 0
    for operation in range(first, 10_000, stride):
        folder = root / "killed"
        shutil.copytree(start, folder)
        ended = fork(story, folder, operation)
        if ended != -signal.SIGKILL:
            assert ended == 0
            break
        kills += 1
        assert fork(story, folder) == 0, f"{name} does not go on after operation {operation}"
        found, expected = outcome(folder), outcome(straight)
        assert found == expected, f"{name}, operation {operation}: {set(found[0]) ^ set(expected[0])}"
        shutil.rmtree(folder)
    return kills


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("name", "first", "stride"), [("train", 3, 11), ("export", 0, 6), ("report", 1, 12)])
def test_killed_before_some_file_operations(tmp_path, name, first, stride):
    assert run_matrix(tmp_path, name, first, stride) >= 3


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", STORIES)
def test_killed_before_every_file_operation(tmp_path, name):
    assert run_matrix(tmp_path, name, 0, 1) >= 8


def run_matrix(folder, name, first, stride):
    # A process of its own, with one thread: a fork has only that which forks.
    command = [sys.executable, __file__, name, str(folder), str(first), str(stride)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


if __name__ == "__main__":
    # The warm process has imported what the stories need, and computed nothing: threads would not survive a fork.
    import looptim.hf
    import looptim.reporting.report
    import looptim.training.train

    story, root, *numbers = sys.argv[1:]
    print(matrix(story, Path(root), *map(int, numbers)))
