"""Results are whole or absent, and answers survive a kill and a full disc."""

import errno
import json

import pytest

from looptim.evaluation import answers as module
from looptim.evaluation.answers import Journal, read, write_result


def test_a_result_is_replaced_whole(tmp_path):
    file = tmp_path / "eval" / "task.json"
    write_result(file, {"results": 1})
    write_result(file, {"results": 2})
    assert read(file) == {"results": 2}
    assert [path.name for path in file.parent.iterdir()] == ["task.json"]
    file.write_text("{")
    assert read(file) is None
    assert read(tmp_path / "nothing.json") is None


def test_answers_come_back_after_a_kill_that_cut_the_last_line(tmp_path):
    given = {"a": [-1.5, True], "b": "text\nof\u2028many\x85lines\r"}
    journal = Journal(tmp_path / "task.json", {"limit": 2})
    for key, answer in given.items():
        journal.add(key, answer)
    # No close: the process is gone.
    with journal.path.open("a") as file:
        file.write('{"key": "c", "ans')
    again = Journal(tmp_path / "task.json", {"limit": 2})
    assert again.answers == given
    with again:
        again.add("c", 1.0)
    assert [json.loads(line).get("key") for line in again.path.read_bytes().splitlines()] == [None, "a", "b", "c"]


def test_what_is_there_is_not_written_again(tmp_path, monkeypatch):
    """A kill or a full disc while it is rewritten would take it."""
    Journal(tmp_path / "task.json", {}).add("a", 1)
    monkeypatch.setattr(Journal, "_write", lambda *_: pytest.fail("written again"))
    assert Journal(tmp_path / "task.json", {}).path.read_bytes().count(b"\n") == 2


def test_answers_of_other_settings_are_dropped_and_done_work_leaves_nothing(tmp_path):
    Journal(tmp_path / "task.json", {"limit": 2}).add("a", 1)
    with Journal(tmp_path / "task.json", {"limit": 3}) as other:
        assert other.answers == {}
        assert other.path.read_bytes().count(b"\n") == 1
    other.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_the_disc_refuses_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    sentence = r"^cannot write results to \S+: [A-Z][^\n\[]*; make room there, or choose another --out$"
    with pytest.raises(ValueError, match=sentence):
        Journal(tmp_path / "file" / "task.json", {})
    with pytest.raises(ValueError, match=sentence):
        write_result(tmp_path / "file" / "task.json", {})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_whole", full)
    with pytest.raises(ValueError, match=sentence):
        write_result(tmp_path / "task.json", {})
