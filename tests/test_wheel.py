"""An installed wheel is the product: in an empty folder, alone or with what its extra `all` brings."""

import os
import subprocess
import sys
import venv

import pytest
from support import REPO, run

TORCH = {"torch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing-extensions"}
"""torch, and what it brings itself on a CPU."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", out, REPO], check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_alone_is_the_framework(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    bin, empty = tmp_path / "venv" / "bin", tmp_path / "empty"
    empty.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def start(*command):
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)

    installed = start(bin / "pip", "install", "-q", "-c", REPO / "constraints.txt", wheel)
    assert installed.returncode == 0, installed.stderr
    listed = start(bin / "pip", "list", "--format=freeze").stdout.lower().replace("_", "-").split()
    brought = {line.partition("==")[0] for line in listed} - TORCH - {"looptim", "pip", "setuptools"}
    assert len([name for name in brought if not name.startswith("nvidia")]) <= 15, brought
    for verb in (
        ["zoo"],
        ["diagnose", "hyperloop"],
        ["recipes"],
        ["count", "nano"],
        ["bench", "operloop", "--repeats=1"],
    ):
        done = start(bin / "looptim", *verb)
        assert done.returncode == 0 and done.stdout and "Warning" not in done.stderr, done.stderr
    for verb, extra in (
        (["train", "nano", "--out", "x", "--no-export"], "lm"),
        (["report", "x"], "plot"),
        (["demo"], "all"),
        (["plan", "nano", "--gpus", "8"], "lm"),
        (["look", "x", "a text", "--out", "x.html"], "lm"),
        (["study", "main", "--out", "x"], "plot"),
        (["doctor"], "lm"),
        (["generate", "x", "a text"], "hf"),
        (["export", "x", "y"], "hf"),
        (["chat", "x"], "hf"),
        (["serve", "x"], "hf"),
        (["loop", "x", "--layout", "1-2x3-1", "--preset", "vanilla", "--out", "y"], "hf"),
        (["evaluate", "x", "--suite", "commonsense"], "eval"),
    ):
        done = start(bin / "looptim", *verb)
        assert done.returncode == 2 and f"pip install 'looptim[{extra}]'" in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert not list(empty.iterdir())


@pytest.mark.slow
def test_the_wheel_with_all_works_in_an_empty_folder(wheel, tmp_path):
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel], check=True)
    environment = os.environ | {"PYTHONPATH": str(target)}
    for verb in (
        ["recipes"],
        ["demo"],
        ["train", "nano", "--out", "runs/nano", "--set", "train.steps=20", "--set", "optim.warmup=5"],
        ["train", "smoke", "--out", "runs/smoke"],
        ["look", "runs/smoke", "1+2=", "--out", "look.html"],
        ["report", "runs/smoke"],
        ["generate", "runs/smoke", "1+2=", "--max-new-tokens", "4"],
        ["study", "main", "--scale", "smoke", "--out", "x"],
    ):
        done = run(*verb, cwd=empty, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr
    for page in ("look.html", "x/index.html", "runs/demo/look.html", "runs/demo/report/index.html"):
        assert (empty / page).is_file(), page
