"""Tasks of known difficulty: what is right, by difficulty and by loops."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import looptim as lo
from looptim.base.console import Progress
from looptim.evaluation import graded
from looptim.evaluation.graded import LOOPS, evaluate_hops
from looptim.recipe import load_config
from looptim.rundir import RunDir
from looptim.training.step import count_right

TINY = ["data.options.hops=3", "data.options.chains=2", "train.seq_len=6", "train.steps=6", "train.valid_every=3"]
TINY += ["optim.warmup=1", "train.batch_size=4"]


def test_right_answers_are_counted_by_hops():
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 0]]), 5).float()
    targets, hops = torch.tensor([[1, 2, 0, -100]]), torch.tensor([[0, 1, 1, -1]])
    assert count_right(logits, targets, hops, range(2)).tolist() == [[1, 1], [1, 2]]


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


@pytest.mark.long
def test_a_run_is_evaluated_on_the_task_and_the_fold_that_it_learned(tmp_path):
    small = ["data.source=synthetic:depo", "data.options.nodes=5", "data.options.hops=2", "data.options.queries=3"]
    more = ["data.valid_fold=1", "model.layout=1-1x2-0", "train.steps=2", "train.batch_size=2", "optim.warmup=1"]
    run = lo.train(load_config("tasks", set=[*small, *more]), tmp_path / "run", progress=False)
    answer = lo.evaluate(run, tasks=["depo"], limit=60, quiet=True)["results"]["depo"]
    by_hops = [answer[f"difficulty {k},none"] for k in (1, 2)]
    assert answer["exact_match,none"] == pytest.approx(sum(by_hops) / 2)
    record = json.loads(next(RunDir(run).eval.glob("*.json")).read_text())
    assert record["settings"]["valid_fold"] == 1 and record["settings"]["knobs"]["nodes"] == 5
    assert evaluate_hops(run, problems=60)["loops"][2] == pytest.approx(by_hops)
    lo.export(run, tmp_path / "export")
    assert lo.evaluate(tmp_path / "export", tasks=["depo"], limit=60, quiet=True)["results"]["depo"] == answer
    with pytest.raises(ValueError, match="task 'deref' has pairs = True and the model pairs = False"):
        graded.run(
            "deref",
            SimpleNamespace(model=lo.load(run)[0], depth=None, loops=None),
            {"knobs": {"pairs": True}, "valid_fold": 0},
            problems=1,
            progress=Progress("", show=False),
        )
