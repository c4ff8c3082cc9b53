"""Answers survive a kill and a full disk."""

import json

import pytest

from looptim.evaluation.answers import Answers, remove_answers
from looptim.rundir import Evaluation


def test_answers_come_back_after_a_kill_that_cut_the_last_line(tmp_path):
    given = {"a": [-1.5, True], "b": "text\nof\u2028many\x85lines\r"}
    first = Answers(Evaluation(tmp_path, "task"), {"limit": 2})
    for key, answer in given.items():
        first.add(key, answer)
    # No close: the process is gone.
    with first.path.open("a") as file:
        file.write('{"key": "c", "ans')
    again = Answers(Evaluation(tmp_path, "task"), {"limit": 2})
    assert again.known == given
    with again:
        again.add("c", 1.0)
    assert [json.loads(line).get("key") for line in again.path.read_bytes().splitlines()] == [None, "a", "b", "c"]


def test_what_is_there_is_not_written_again(tmp_path, monkeypatch):
    """A kill or a full disk while it is rewritten would take it."""
    Answers(Evaluation(tmp_path, "task"), {}).add("a", 1)
    monkeypatch.setattr(Answers, "_write", lambda *_: pytest.fail("written again"))
    assert Answers(Evaluation(tmp_path, "task"), {}).path.read_bytes().count(b"\n") == 2


def test_answers_of_other_settings_are_dropped_and_done_work_leaves_nothing(tmp_path):
    Answers(Evaluation(tmp_path, "task"), {"limit": 2}).add("a", 1)
    with Answers(Evaluation(tmp_path, "task"), {"limit": 3}) as other:
        assert other.known == {}
        assert other.path.read_bytes().count(b"\n") == 1
    remove_answers(Evaluation(tmp_path, "task"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"^cannot write results to \S+: [A-Z][^\n\[]*; free some space there, or choose"
    ):
        Answers(Evaluation(tmp_path / "file", "task"), {})
