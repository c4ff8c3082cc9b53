"""Presets of one's own in the workers of a study: from files, plain scripts, standard input and notebooks."""

import json
import subprocess
import sys

import pytest
from support import config, run

import looptim as lo
from looptim.studies import carry

pytestmark = pytest.mark.long

STUDY = """
title = "Mine"
base = "recipe.toml"
tokens = 512
seeds = [0]
reference = "vanilla"
matched = false
[variants.vanilla]
preset = "vanilla"
[variants.own]
preset = "{preset}"
"""

PRESET = """
import torch
import looptim as lo

FACTOR = 1.0

class Own(lo.Objective):
    symbol = "½‖t − o‖²"

    def value(self, o, t):
        return 0.5 * (t - o).square().sum(-1) * FACTOR

    def grad(self, o, t):
        return (o - t) * FACTOR

{decorator}
def mine(width, steps):
    rule = lo.rules.GradientDescent(lo.controls.ConstantStep(0.5), lo.controls.ConstantDecay(0.0))
    return lo.Loop(lo.Transition(lo.projections.Plain(), Own(), rule), width=width, steps=steps)
"""
PLAIN = PRESET.format(decorator="")
SCRIPT = PRESET.format(decorator="@lo.register") + '\nlo.study("study.toml", "out", jobs=2)\n'
"""Without a main guard, as people write it."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{i} and {i + 1}\n" for i in range(2000)))
    data = {"source": "text.txt", "tokenizer": "bytes", "options": {}, "cache": "cache"}
    recipe = config(data=data, optim={"warmup": 1}, checkpoint_every=2, valid_batches=1)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    (tmp_path / "study.toml").write_text(STUDY.format(preset="mine"))
    return tmp_path


def losses(folder):
    found = json.loads((folder / "out" / "results.json").read_text())["variants"]
    return {name: row["loss"]["values"] for name, row in found.items()}


def execute(*command, **options):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, **options)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_script_without_a_guard_trains_again_what_was_edited_and_nothing_else(folder):
    (folder / "script.py").write_text(SCRIPT)
    assert "2 of 2 runs are done" in execute("script.py")
    before = losses(folder)
    (folder / "script.py").write_text(SCRIPT.replace("FACTOR = 1.0", "FACTOR = 0.5"))
    said = execute("script.py")
    assert "own: its code has changed; what the old code trained is not used" in said
    assert "vanilla: 1 of 1 runs are used again" in said and "own: 1 of 1" not in said
    after = losses(folder)
    assert after["vanilla"] == before["vanilla"] and after["own"] != before["own"]


@pytest.mark.slow
def test_a_study_from_standard_input_is_used_again(folder):
    assert "2 of 2 runs are done" in execute("-", input=SCRIPT)
    assert "own: 1 of 1 runs are used again" in execute("-", input=SCRIPT)


def test_a_study_in_a_notebook(folder):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    preset, call = SCRIPT.split("\nlo.study")
    cells = [nbformat.v4.new_code_cell(text) for text in (preset, f"lo.study{call}")]
    client(nbformat.v4.new_notebook(cells=cells), timeout=240, kernel_name="python3").execute()
    (record,) = folder.glob("out/runs/mine_*/env.json")
    assert len(json.loads(record.read_text())["code"]) == 16
    assert losses(folder).keys() == {"vanilla", "own"}


def test_a_study_on_the_command_line_takes_a_preset_from_a_file(folder):
    (folder / "my.py").write_text(PLAIN)
    (folder / "study.toml").write_text(STUDY.format(preset="my.py:mine"))
    command = ["study", "study.toml", "--out", "out", "--jobs", "2"]
    refused = run(*command)
    assert refused.returncode == 2 and not (folder / "out").exists()
    assert "variant 'own' does not build: my.py:mine is code that a file asks for" in refused.stderr
    done = run(*command, "--import", "my.py", timeout=240)
    assert done.returncode == 0, done.stderr
    assert "own, seed 0: validation loss" in done.stderr


def test_what_cannot_travel_is_a_sentence(monkeypatch):
    file = sys.stdout

    def mine(width, steps):
        return file

    monkeypatch.setitem(lo.PRESETS, "mine", mine)
    with pytest.raises(
        ValueError, match=r"the presets mine cannot be sent to workers \(.*\); remove what cannot be pickled"
    ):
        carry.pack(["mine"])
