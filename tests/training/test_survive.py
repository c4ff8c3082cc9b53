"""Runs that survive a cluster: a lost process, restarts, other numbers of processes, SIGTERM, checkpoints meanwhile."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from support import config, losses

import looptim as lo
from looptim.rundir import RunDir
from looptim.training.storage import DIGESTS

pytestmark = pytest.mark.long

# Dies as asked before a file operation in the run's folder: rank and number are given; and only in the first life.
DIES = """
import os, signal, sys
rank, number, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
writes, done = os.O_WRONLY | os.O_RDWR | os.O_CREAT, 0
changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
def watch(event, arguments):
    global done
    if event in changes or (event == "open" and isinstance(arguments[2], int) and arguments[2] & writes):
        if str(arguments[0]).startswith(folder):
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
if int(os.environ["RANK"]) == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    sys.addaudithook(watch)
sys.argv = ["looptim", *sys.argv[4:]]
from looptim.__main__ import main
main()
"""


def recipe(folder, **train):
    settings = {"steps": 6, "valid_every": 6, "checkpoint_every": 2, "batch_size": 8, **train}
    (folder / "recipe.toml").write_text(config(model={"experts": 8}, **settings).to_toml())
    (folder / "dies.py").write_text(DIES)
    return folder / "recipe.toml"


def start(processes, folder, out, *, rank=-1, number=-1, launch=(), extra=()):
    """`looptim train` under torchrun, of which a process dies before one of its file operations."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *launch]
    dies = [str(folder / "dies.py"), str(rank), str(number), str(out)]
    train = ["train", str(folder / "recipe.toml"), "--out", str(out), "--no-export", "--resume", *extra]
    command = [sys.executable, *torchrun, *dies, *train]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def same(out, straight):
    assert losses(out) == losses(straight)
    names = [sorted(str(p.relative_to(each)) for p in each.rglob("*")) for each in (out, straight)]
    assert names[0] == names[1]
    # Weights and optimizer to the last bit.
    last = (f"checkpoints/step_000006/{DIGESTS}", f"checkpoints/step_000004/{DIGESTS}")
    for name in last:
        lines = [
            [line for line in (each / name).read_text().splitlines() if "checkpoint.json" not in line]
            for each in (out, straight)
        ]
        assert lines[0] == lines[1]


def test_a_lost_process_is_one_sentence(tmp_path):
    recipe(tmp_path, async_checkpoints=True)
    began = time.monotonic()
    lost = start(2, tmp_path, tmp_path / "lost", rank=1, number=1)
    assert lost.returncode != 0 and time.monotonic() - began < 60
    assert lost.stderr.count("one of 2 processes has disappeared, so all stop") == 1, lost.stderr
    assert lost.stderr.count("looptim: ") == 1


# Restarted processes hung in gloo's own connection once, before any code of ours: too rare for each run of the suite.
@pytest.mark.slow
def test_restarts_go_on_by_themselves(tmp_path):
    recipe(tmp_path, async_checkpoints=True)
    straight = tmp_path / "straight"
    done = start(2, tmp_path, straight)
    assert done.returncode == 0, done.stderr
    again = start(2, tmp_path, tmp_path / "again", rank=0, number=12, launch=["--max-restarts=2"])
    assert again.returncode == 0, again.stderr
    same(tmp_path / "again", straight)


SLOWLY = """
import os, sys, time
from looptim.training import train
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "a") as file:
        file.write(os.environ["WORLD_SIZE"] + " ")
before = train.update
def slowly(run, step):
    time.sleep(0.2)
    return before(run, step)
train.update = slowly
sys.argv = ["looptim", *sys.argv[2:]]
from looptim.__main__ import main
main()
"""


class Node:
    """`torchrun` as one of up to two nodes, with two processes; its own process group."""

    def __init__(self, folder, port, name):
        (folder / "slowly.py").write_text(SLOWLY)
        elastic = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=one"]
        soon = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
        where = [f"--rdzv-endpoint=127.0.0.1:{port}", "--monitor-interval=1", "--shutdown-timeout=60"]
        script = [str(folder / "slowly.py"), str(folder / "sizes"), "train", str(folder / "recipe.toml")]
        train = [*script, "--out", str(folder / "run"), "--no-export", "--resume"]
        command = [sys.executable, "-m", "torch.distributed.run", *elastic, soon, *where, *train]
        # Without this, torchrun 2.13 does not tell a node that comes later where to meet.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.said = folder / f"{name}.txt"
        with self.said.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, env=environment)

    def kill(self):
        """Torchrun and its processes, as if the machine had lost power."""
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
        mine = [int(pid) for pid, parent in map(str.split, listed.splitlines()) if int(parent) == self.process.pid]
        for pid in (self.process.pid, *mine):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def wait_for(found, node):
    until = time.monotonic() + 300
    while not found():
        assert time.monotonic() < until and node.process.poll() is None, node.said.read_text()
        time.sleep(0.1)


@pytest.mark.slow
def test_a_node_is_lost_and_another_comes_and_the_losses_are_those_of_one_process(tmp_path):
    settings = {"steps": 60, "valid_every": 60, "checkpoint_every": 5, "batch_size": 8, "keep_last": 100}
    alone = config(model={"experts": 8}, **settings)
    (tmp_path / "recipe.toml").write_text(alone.to_toml())
    lo.train(alone, tmp_path / "alone", progress=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stays = Node(tmp_path, port, "stays")
    time.sleep(1)
    lost = Node(tmp_path, port, "lost")
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for((checkpoints / "step_000010").is_dir, stays)
    lost.kill()
    wait_for((checkpoints / "step_000030").is_dir, stays)
    comes = Node(tmp_path, port, "comes")
    for node in (stays, comes):
        assert node.process.wait(timeout=300) == 0, node.said.read_text()
    assert (tmp_path / "sizes").read_text().split() == ["4", "2", "4"]
    expected = losses(tmp_path / "alone")
    assert losses(tmp_path / "run") == {step: pytest.approx(loss, rel=1e-5) for step, loss in expected.items()}


def test_checkpoints_beside_the_training_are_those_of_one_that_waits(tmp_path):
    few = config(steps=6, valid_every=6)
    beside = few.model_copy(update={"train": few.train.model_copy(update={"async_checkpoints": True})})
    for name, each in (("waits", few), ("beside", beside)):
        lo.train(each, tmp_path / name, progress=False)
    sums = [RunDir(tmp_path / name).latest() / DIGESTS for name in ("waits", "beside")]
    one, two = ([line for line in file.read_text().splitlines() if "checkpoint.json" not in line] for file in sums)
    assert one == two
    assert losses(tmp_path / "waits") == losses(tmp_path / "beside")


def test_what_a_checkpoint_beside_the_training_fails_at_is_said(tmp_path, monkeypatch):
    from looptim.training import storage

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "write_tensors", full)
    with pytest.raises(ValueError, match=r"could not write the checkpoint of step 3 .*No space left on device"):
        lo.train(config(async_checkpoints=True), tmp_path / "run", progress=False)
    assert RunDir(tmp_path / "run").latest() is None


HANGS = """
import sys, threading, time
import looptim as lo
from looptim.training import stop, train
stop.GRACE = 2.0
before = train.update
def hangs(run, step):
    if step == 3:
        print("now", flush=True)
        # A wait for another process's share, if that is lost, does not end.
        threading.Event().wait() if sys.argv[3] == "lost" else time.sleep(1)
    return before(run, step)
train.update = hangs
lo.train(lo.load_config(sys.argv[1]), sys.argv[2], progress=False)
"""


@pytest.mark.parametrize("case", ["lost", "slow"])
def test_sigterm_saves_within_its_time_or_says_that_it_cannot(tmp_path, case):
    recipe(tmp_path, steps=12, checkpoint_every=3)
    (tmp_path / "hangs.py").write_text(HANGS)
    command = [sys.executable, str(tmp_path / "hangs.py"), str(tmp_path / "recipe.toml"), str(tmp_path / "run"), case]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "now\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    latest = RunDir(tmp_path / "run").latest().name
    if case == "slow":
        assert latest == "step_000004" and "KeyboardInterrupt" in said
    else:
        assert latest == "step_000003" and process.returncode == 1
        assert "the current update did not end within 2 s of SIGTERM and is not saved; --resume continues" in said
