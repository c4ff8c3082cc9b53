"""Killed before any of its file operations, every verb ends as if it had not been, and leaves nothing behind.

An audit hook sees each file that is opened for writing, renamed or deleted, and kills the process before the one that
is asked for. One warm process forks those that die and those that go on after them.
"""

import json
import mmap
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from support import config, losses

import looptim as lo
from looptim.config import ParallelConfig
from looptim.rundir import RECORD
from looptim.training.storage import DIGESTS

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.move"}


def train(folder: Path) -> None:
    """Packing, training, checkpoints, and what is pruned of them."""
    data = {"source": str(folder.parent / "text.txt"), "options": {}, "tokenizer": "bytes", "valid_fraction": 0.2}
    data["cache"] = str(folder / "cache")
    lo.train(config(data=data, steps=3, valid_every=3, checkpoint_every=1), folder / "run", resume=True, progress=False)


def train_on_a_mesh(folder: Path, *, beside: bool = False) -> None:
    """Two copies of a model whose experts are spread over two processes each."""
    data = {"source": str(folder.parent / "text.txt"), "options": {}, "tokenizer": "bytes", "valid_fraction": 0.2}
    data["cache"] = str(folder / "cache")
    settings = {"steps": 3, "valid_every": 3, "checkpoint_every": 1, "batch_size": 4, "async_checkpoints": beside}
    recipe = config(data=data, model={"experts": 8}, **settings)
    mesh = ParallelConfig(replicate=2, expert=2)
    lo.train(recipe.model_copy(update={"parallel": mesh}), folder / "run", resume=True, progress=False)


def export(folder: Path) -> None:
    lo.export(folder / "run")


def evaluate(folder: Path) -> None:
    lo.evaluate(folder / "run", tasks=["addition"], limit=3, quiet=True)


def report(folder: Path) -> None:
    lo.report(folder / "run", out=folder / "report")


def study(folder: Path) -> None:
    lo.study(folder / "study.toml", folder / "study", progress=False)


def begin_with_a_run(folder: Path) -> None:
    lo.train(config(steps=3, valid_every=3), folder / "run", progress=False)


def begin_with_a_study(folder: Path) -> None:
    (folder / "recipe.toml").write_text(config(checkpoint_every=2, keep_last=1).to_toml())
    text = 'title = "t"\nbase = "recipe.toml"\ntokens = 384\nseeds = [0]\nreference = "a"\n'
    (folder / "study.toml").write_text(text + '[variants.a]\npreset = "vanilla"\n[variants.b]\npreset = "huginn"\n')


class Story(NamedTuple):
    """What is killed and goes on."""

    tell: Callable[[Path], None]
    begin: Callable[[Path], None] | None = None
    """What is there before."""
    processes: int = 1


STORIES = {
    "train": Story(train),
    "train on two processes": Story(train, processes=2),
    "train on a mesh": Story(train_on_a_mesh, processes=4),
    "train on a mesh, checkpoints beside it": Story(partial(train_on_a_mesh, beside=True), processes=4),
    "export": Story(export, begin_with_a_run),
    "evaluate": Story(evaluate, begin_with_a_run),
    "report": Story(report, begin_with_a_run),
    "study": Story(study, begin_with_a_study),
}


class Death(NamedTuple):
    """Which process dies, and before which of its file operations."""

    rank: int
    operation: int


def run(tell: Callable[[Path], None], folder: Path, processes: int = 1, death: Death | None = None) -> int:
    """Tell a story in forked processes, all of which are killed once one has died; how the first to end ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        places = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        child = os.fork()
        if not child:
            os.environ.update({name: str(value) for name, value in places.items()})
            tell_watched(tell, folder, death.operation if death and death.rank == rank else None)
        children.append(child)
    ended = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        ended = ended or os.waitstatus_to_exitcode(status)
        for other in children if ended else ():
            # This is what torchrun does.
            os.kill(other, signal.SIGKILL)
    return ended


def tell_watched(tell: Callable[[Path], None], folder: Path, die_before: int | None) -> None:
    """Tell a story and end, or die before a file operation of this process or of a worker that it forks."""
    # All workers count together.
    done = memoryview(mmap.mmap(-1, 8)).cast("Q")

    def watch(event, arguments):
        changes = event in CHANGES or (event == "open" and arguments[2] & WRITES)
        if changes and str(arguments[0]).startswith(str(folder)):
            done[0] += 1
            if done[0] - 1 == die_before:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    try:
        tell(folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def outcome(folder: Path) -> tuple:
    """What is to be the same: which files there are, every loss and all that is saved to the last bit, every result."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    runs = [file.parent for file in sorted(folder.rglob("metrics.jsonl"))]
    logged = [losses(run, key) for run in runs for key in ("loss", "valid_loss", "tokens")]
    found = [json.loads(file.read_text()) for file in sorted(folder.rglob("eval/*.json"))]
    # A record has times.
    lines = [line for file in sorted(folder.rglob(DIGESTS)) for line in file.read_text().splitlines()]
    return names, logged, [line for line in lines if RECORD not in line], [record["results"] for record in found]


def matrix(name: str, root: Path, first: int, stride: int) -> int:
    """Kill a story before every `stride`-th of its operations, of each process in turn; how often."""
    (tell, begin, processes), straight, start = STORIES[name], root / "straight", root / "start"
    (root / "text.txt").write_text("".join(f"line {n} of {n * n}\n" for n in range(600)))
    start.mkdir()
    assert begin is None or run(begin, start) == 0
    shutil.copytree(start, straight)
    assert run(tell, straight, processes) == 0
    expected = outcome(straight)
    kills, alive = 0, set(range(processes))
    for operation in range(first, 10_000, stride):
        for rank in sorted(alive):
            folder = root / "killed"
            shutil.copytree(start, folder)
            if run(tell, folder, processes, Death(rank, operation)) == 0:
                alive.discard(rank)
            else:
                kills += 1
                assert run(tell, folder, processes) == 0, f"{name} does not go on after {operation} of process {rank}"
            found = outcome(folder)
            assert found == expected, f"{name}, {operation} of {rank}: {set(found[0]) ^ set(expected[0])}"
            shutil.rmtree(folder)
        if not alive:
            break
    return kills


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("name", "first", "stride"),
    [
        ("train", 3, 11),
        ("train on two processes", 4, 17),
        ("export", 0, 6),
        ("evaluate", 1, 3),
        ("report", 1, 12),
        ("study", 5, 50),
    ],
)
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
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3000)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


if __name__ == "__main__":
    # The warm process has imported what the stories need, and computed nothing: threads would not survive a fork.
    import looptim.evaluation
    import looptim.hf
    import looptim.reporting.report
    import looptim.studies
    import looptim.training.train

    # A worker that is forked has the hook, which one that is spawned has not.
    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda kind: forking
    story, root, *numbers = sys.argv[1:]
    print(matrix(story, Path(root), *map(int, numbers)))
