"""Files and folders are whole or absent, leftovers of the dead go, and what the system refuses is one sentence."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from looptim.base.files import (
    HeldError,
    claimed,
    os_errors_as,
    remove_whole,
    whole_folder,
    write_together,
    write_whole,
)


def content(folder):
    return {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    write_whole(tmp_path / "new" / "a", "one")
    write_whole(tmp_path / "new" / "a", b"two")
    assert content(tmp_path) == {"a": "two"}
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "new" / "a", "three")
    assert content(tmp_path) == {"a": "two"}


def test_files_are_written_together_the_last_one_last(tmp_path, monkeypatch):
    order, replace = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: order.append(to.name) or replace(self, to))
    write_together(tmp_path / "out", {"b.png": b"1", "index.html": b"2"})
    assert order == ["b.png", "index.html"] and content(tmp_path) == {"b.png": "1", "index.html": "2"}


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with whole_folder(tmp_path / "a") as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "file").write_text("one")
        assert not (tmp_path / "a").exists()
    assert content(tmp_path) == {"file": "one"}
    with pytest.raises(OSError, match="No space"), whole_folder(tmp_path / "b") as aside:
        full((aside / "file").write_text("two"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("replace", "left"), [(False, "first"), (True, "second")])
def test_of_two_folders_the_first_to_finish_wins_unless_it_is_replaced(tmp_path, replace, left):
    with whole_folder(tmp_path / "a", replace=replace) as slow:
        (slow / "file").write_text("second")
        with whole_folder(tmp_path / "a", replace=replace) as fast:
            (fast / "file").write_text("first")
    assert content(tmp_path) == {"file": left}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_is_removed_so_that_a_kill_leaves_none_that_looks_complete(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    seen = []
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: seen.append(path.name))
    remove_whole(tmp_path / "a")
    assert not (tmp_path / "a").exists() and len(seen) == 1 and seen[0].startswith(".a.")


KILLED = """
import os, sys
from pathlib import Path
from looptim.base.files import whole_folder, _aside
with whole_folder(Path(sys.argv[1]) / "folder") as aside, _aside(Path(sys.argv[1]) / "file") as file:
    (aside / "half").touch()
    file.touch()
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    with whole_folder(tmp_path / "folder") as slow:
        write_whole(tmp_path / "file", "")
        with whole_folder(tmp_path / "folder"):
            assert slow.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_what_the_system_refuses_is_one_sentence():
    sentence = r"^cannot write the report: No space left on device; choose another folder$"
    with pytest.raises(ValueError, match=sentence), os_errors_as("cannot write the report", "choose another folder"):
        full()
    with pytest.raises(KeyError), os_errors_as("", ""):
        raise KeyError


def test_only_a_held_lock_is_another_process(tmp_path, monkeypatch):
    import fcntl

    with claimed(tmp_path / "run"), pytest.raises(HeldError, match="another process is at work"):
        claimed(tmp_path / "run").__enter__()
    # The error of what is done in the folder is not one of the folder.
    with pytest.raises(PermissionError, match="elsewhere"), claimed(tmp_path / "run"):
        raise PermissionError("elsewhere")

    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with claimed(tmp_path / "run"):
        pass
