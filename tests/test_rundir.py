"""A run directory: its metrics have one schema, its checkpoints an order, its results are whole or absent."""

import errno
import json
import math

import numpy as np
import pytest

from looptim import rundir
from looptim.rundir import Evaluation, RunDir
from looptim.training import checkpoint


def test_metrics_of_any_name_are_written_and_read(tmp_path):
    metrics = RunDir(tmp_path).metrics
    metrics.append({"step": 1, "tokens": 8, "mine": [0.5, None], "by_layer": {"blocks.1": [1.0]}})
    metrics.append({"step": 1, "tokens": 8, "loss": 2.0})
    metrics.append({"step": 2, "tokens": 16, "loss": None, "mine": 3.0, "by_layer": {"blocks.1": [1.0, 2.0]}})
    run = RunDir(tmp_path).read("name")
    assert [line["step"] for line in run.lines] == [1, 2] and run.lines[0]["loss"] == 2.0
    np.testing.assert_array_equal(run.column("loss")[1], [2.0, math.nan])
    # A value is in the column of its form only.
    np.testing.assert_array_equal(run.column("mine")[1], [3.0])
    np.testing.assert_array_equal(run.columns("mine")[1], [[0.5, math.nan]])
    tokens, table = run.columns("by_layer", "blocks.1")
    np.testing.assert_array_equal(tokens, [8, 16])
    np.testing.assert_array_equal(table, [[1.0, math.nan], [1.0, 2.0]])


@pytest.mark.parametrize("record", [{"step": 1}, {"step": 1, "tokens": 8, "mine": "low"}])
def test_what_could_not_be_read_is_not_written(tmp_path, record):
    with pytest.raises(ValueError, match="number"):
        RunDir(tmp_path).metrics.append(record)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_keeps_what_was_logged_before(tmp_path):
    metrics = RunDir(tmp_path).metrics
    metrics.keep(until=3)
    for step in range(5):
        metrics.append({"step": step, "tokens": step, "loss": 0.1 + 0.2 * step})
    with metrics.path.open("ab") as file:
        file.write(b'7\n\xff\xfe\n{"loss": 1}\n{"step": "x"}\n{"step": 4, "tok')
    before = metrics.path.read_bytes().splitlines(keepends=True)
    assert metrics.last("loss")["step"] == 4 and metrics.last("valid_loss") == {}
    metrics.keep(until=3)
    assert metrics.path.read_bytes().splitlines(keepends=True) == before[:4]
    # From the start, also the validation before the first update is made again.
    metrics.keep(until=0)
    assert metrics.read() == []


def test_checkpoints_are_ordered_by_number_and_foreign_folders_left_alone(tmp_path):
    for name in ("step_999999", "step_1000000", "step_1000001", "step_000004_best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "checkpoint.json").write_text("{}")
    assert RunDir(tmp_path).latest().name == "step_1000001"
    checkpoint.prune(RunDir(tmp_path), keep_last=1, keep_every=None)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_1000001", "step_000004_best"}


def test_a_result_is_replaced_whole(tmp_path):
    files = Evaluation(tmp_path / "eval", "task", limit=20, loops=6)
    assert files.read() is None
    for number in (1, 2):
        files.write(files.result, {"results": number})
    assert files.read() == {"results": 2}
    assert [path.name for path in files.folder.iterdir()] == ["task.loops6.limit20.json"]
    for text in ("{", "[]"):
        files.result.write_text(text)
        assert files.read() is None


def test_results_come_with_the_loops_they_were_asked_for(tmp_path):
    run = RunDir(tmp_path)
    model = {"weights": "", "preset": "", "options": {}, "loops": 6, "parameters": 1, "flops_per_token": 1}
    settings = {"model": model, "limit": None}
    record = {"task": "piqa", "settings": settings, "results": {}, "samples": {}, "notes": []}
    for loops in (None, 6):
        files = run.evaluation("piqa", loops=loops)
        files.write(files.result, {**record, "loops": loops})
    assert [(loops, record["loops"]) for loops, record in run.evaluations()] == [(None, None), (6, 6)]
    run.evaluation("other").result.write_text(json.dumps({"task": "other"}))
    with pytest.raises(ValueError, match=r"other\.json is not a result of `looptim evaluate`; repair or remove it"):
        run.evaluations()


def test_what_the_disk_refuses_is_one_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    files = Evaluation(tmp_path, "task")
    monkeypatch.setattr(rundir, "write_whole", full)
    with pytest.raises(
        ValueError, match=r"^cannot write results to \S+: No space left on device; free some space there, or"
    ):
        files.write(files.result, {})
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"^cannot write to \S+: Is a directory; the last checkpoint is kept$"):
        RunDir(tmp_path).metrics.append({"step": 1, "tokens": 1})
