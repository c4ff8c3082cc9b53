"""Chained assignments, solved by hand: what is right, by hops and by loops."""

import json

import numpy as np
import pytest
import torch

import looptim as lo
from looptim.evaluation.hops import LOOPS, evaluate_hops
from looptim.recipe import load_config
from looptim.rundir import RunDir
from looptim.training.step import count_right

TINY = ["data.options.hops=3", "data.options.chains=2", "train.seq_len=6", "train.steps=6", "train.valid_every=3"]
TINY += ["optim.warmup=1", "train.batch_size=4"]


def test_right_answers_are_counted_by_hops():
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 0]]), 5).float()
    targets, hops = torch.tensor([[1, 2, 0, -100]]), torch.tensor([[0, 1, 1, -1]])
    assert count_right(logits, targets, hops).tolist() == [[1, 1], [1, 2]]


@pytest.mark.long
@pytest.mark.parametrize(("preset", "shared"), [("vanilla", True), ("operloop", False), ("none", False)])
def test_a_run_is_asked_at_every_depth_that_its_transition_has(tmp_path, preset, shared):
    layout = {"none": "2"}.get(preset, "0-1x2-0")
    run = lo.train(load_config("deref", set=[*TINY, f"loop.preset={preset}", f"model.layout={layout}"]), tmp_path / "r")
    record = evaluate_hops(run, problems=50)
    trained = 1 if preset == "none" else 2
    assert set(record["loops"]) == ({*LOOPS, trained} if shared else {trained})
    assert all(len(shares) == 3 and 0 <= min(shares) <= max(shares) <= 1 for shares in record["loops"].values())
    assert record["results"]["exact_match,none"] == pytest.approx(np.mean(record["loops"][trained]))
    assert json.loads(RunDir(run).hops_file.read_text())["problems"] == 50
    logged = [line["valid_accuracy"] for line in RunDir(run).read().lines if "valid_accuracy" in line]
    assert len(logged) == 3 and all(len(shares) == 3 for shares in logged)
