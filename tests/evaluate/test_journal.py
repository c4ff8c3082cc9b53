"""Results are whole or absent, and answers survive a kill."""

import json

from looptim.evaluate.journal import Journal, read, write_result


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
    journal = Journal(tmp_path, "task", {"limit": 2})
    journal.add("a", [-1.5, True])
    journal.add("b", "text\nof two lines")
    # No close: the process is gone.
    with journal.path.open("a") as file:
        file.write('{"key": "c", "ans')
    again = Journal(tmp_path, "task", {"limit": 2})
    assert again.answers == {"a": [-1.5, True], "b": "text\nof two lines"}
    again.add("c", 1.0)
    again.close(done=False)
    assert [json.loads(line).get("key") for line in again.path.read_text().splitlines()] == [None, "a", "b", "c"]


def test_answers_of_other_settings_are_dropped_and_done_work_leaves_nothing(tmp_path):
    Journal(tmp_path, "task", {"limit": 2}).add("a", 1)
    other = Journal(tmp_path, "task", {"limit": 3})
    assert other.answers == {}
    other.close(done=True)
    assert list(tmp_path.iterdir()) == []
