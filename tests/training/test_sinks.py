"""Sinks: trackio for real and offline, wandb and tensorboard through stand-ins that record the calls."""

import math
import subprocess
import sys
import types

import pytest

from looptim.rundir import RunDir
from looptim.training.sinks import open_sinks, scalars

TRACKIO = """
import socket, sys
from pathlib import Path

def refuse(*args, **kwargs):
    raise OSError("no network in this test")

socket.socket.connect = refuse
from looptim.rundir import RunDir
from looptim.training.sinks import open_sinks

for steps in ((10, 20), (30,)):
    (sink,) = open_sinks(["trackio"], RunDir(sys.argv[1]), config={"model": {"width": 8}})
    for step in steps:
        sink.log(step, {"loss": 100 / step, "step_size/0": 0.5})
    sink.close()
    sink.close()

from trackio.sqlite_storage import SQLiteStorage

name = "nano-" + (Path(sys.argv[1]) / "tracking_id").read_text().strip()
print([(row["step"], row["loss"], row["step_size/0"]) for row in SQLiteStorage.get_logs("looptim", name)])
print(SQLiteStorage.get_run_config("looptim", name)["model"])
"""


@pytest.mark.long
def test_trackio_logs_offline_and_a_resumed_run_continues(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    # trackio reads its folder at import, hence another process.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    command = [sys.executable, "-c", TRACKIO, str(tmp_path / "runs" / "nano")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Nothing but our own prints on stdout, which belongs to the command.
    assert done.stdout.splitlines() == [
        "[(10, 10.0, 0.5), (20, 5.0, 0.5), (30, 3.3333333333333335, 0.5)]",
        "{'width': 8}",
    ]


class Recorder:
    """Records every call of any method, and answers with itself."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.fixture
def fake(monkeypatch):
    def install(name, entry):
        recorder, module = Recorder(), types.ModuleType(name)
        setattr(module, entry, getattr(recorder, entry))
        monkeypatch.setitem(sys.modules, name, module)
        return recorder

    return install


def test_wandb_gets_every_call_and_stays_offline(tmp_path, fake, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    recorder = fake("wandb", "init")
    (sink,) = open_sinks(["wandb"], RunDir(tmp_path / "nano"), config={"seed": 1})
    sink.log(3, {"loss": 2.0})
    sink.close()
    sink.close()
    (_, _, init), *rest = recorder.calls
    assert init["mode"] == "offline" and init["name"] == "nano" and init["config"] == {"seed": 1}
    assert rest == [("log", ({"loss": 2.0},), {"step": 3}), ("finish", (), {})]
    open_sinks(["wandb"], RunDir(tmp_path / "nano"), config={})
    again = recorder.calls[-1][2]
    assert again["id"] == init["id"] and again["resume"] == "allow"
    monkeypatch.setenv("WANDB_MODE", "online")
    open_sinks(["wandb"], RunDir(tmp_path / "other" / "nano"), config={})
    other = recorder.calls[-1][2]
    assert other["id"] != init["id"] and other["mode"] == "online"


def test_tensorboard_gets_every_number(tmp_path, fake):
    recorder = fake("torch.utils.tensorboard", "SummaryWriter")
    (sink,) = open_sinks(["tensorboard"], RunDir(tmp_path), config={"seed": 1})
    sink.log(3, {"loss": 2.0, "lr": 0.1})
    sink.close()
    sink.close()
    assert recorder.calls == [
        ("SummaryWriter", (), {"log_dir": str(tmp_path / "tensorboard")}),
        ("add_text", ("config", "    seed = 1"), {}),
        ("add_scalar", ("loss", 2.0), {"global_step": 3}),
        ("add_scalar", ("lr", 0.1), {"global_step": 3}),
        ("close", (), {}),
    ]


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_package_is_one_sentence_and_nothing_is_opened(tmp_path, fake, monkeypatch, name, module):
    recorder = fake("trackio", "init")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"sink '{name}' cannot be imported .*; run `pip install {name}`"):
        open_sinks(["trackio", name], RunDir(tmp_path), config={})
    assert recorder.calls == [] and list(tmp_path.iterdir()) == []


def test_bad_names(tmp_path):
    with pytest.raises(ValueError, match="unknown sink 'wandbb', did you mean 'wandb'"):
        open_sinks(["wandbb"], RunDir(tmp_path), config={})
    with pytest.raises(ValueError, match="known: trackio, wandb, tensorboard"):
        open_sinks(["csv"], RunDir(tmp_path), config={})
    with pytest.raises(ValueError, match="list of names"):
        open_sinks("wandb", RunDir(tmp_path), config={})


def test_a_sink_that_fails_to_open_closes_the_others(tmp_path, fake, monkeypatch):
    first = fake("wandb", "init")
    broken = types.ModuleType("torch.utils.tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", broken)
    with pytest.raises(AttributeError):
        open_sinks(["wandb", "tensorboard"], RunDir(tmp_path), config={})
    assert first.calls[-1][0] == "finish"


def test_scalars_flattens_a_metrics_line():
    line = {"step": 1, "loss": math.inf, "ok": True, "note": "x", "moe_load": {"blocks.1": [1.5, None]}}
    assert scalars(line) == {"loss": math.inf, "moe_load/blocks.1/0": 1.5}
