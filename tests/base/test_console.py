"""Progress: a bar on a terminal, lines elsewhere, on the stream there was when it began."""

import contextlib
import io
import re
import subprocess
import sys

import pytest

from looptim.base import console
from looptim.base.console import Progress, print_table


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_elsewhere_a_line_now_and_then(clock, capsys):
    with Progress("reading", 200) as progress:
        for second in range(1, 101):
            clock[0] = second
            progress.advance(2)
        progress.say("done")
    assert capsys.readouterr().err.splitlines() == [
        "reading",
        "reading: 30%, 1:10 left",
        "reading: 60%, 0:40 left",
        "reading: 90%, 0:10 left",
        "done",
    ]


def test_what_the_caller_says_is_shown_at_once_if_it_wants_that(clock, capsys):
    progress = Progress("training", 10)
    progress.advance(1, "loss 2.5", left=61, now=True)
    assert capsys.readouterr().err == "training: 10%, loss 2.5, 1:01 left\n"


def test_a_total_that_nobody_knows(clock, capsys):
    progress = Progress("reading")
    clock[0] = 65
    progress.advance(1000)
    assert capsys.readouterr().err == "reading: 1:05 so far\n"


def test_a_terminal_has_a_bar_and_what_is_said_stays_above_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with contextlib.redirect_stderr(terminal), Progress("reading", 4) as progress:
        progress.advance(1, "loss 2.5", left=61)
        progress.say("a line [of] text")
        assert sys.stderr is terminal
    shown = terminal.getvalue()
    assert "reading: 25%, loss 2.5, 1:01 left" in shown
    assert "a line [of] text\n" in shown
    # The bar goes when the work is done: the last thing written erases its line.
    assert shown.rstrip().endswith("\x1b[2K")


def test_the_answers_of_a_batch_come_after_the_time_of_all(clock, capsys):
    progress = Progress("task", batch=8)
    progress.expect(24, done=8)
    clock[0] = 40
    progress.advance(1)
    # A batch of 8 took 40 seconds, and 15 are left of the 24.
    assert capsys.readouterr().err == "task: 38%, 1:15 left\n"


def test_it_keeps_the_stream_it_was_made_with(capsys):
    progress = Progress("task")
    with contextlib.redirect_stderr(io.StringIO()) as nowhere:
        progress.say("shown")
    assert capsys.readouterr().err == "shown\n" and nowhere.getvalue() == ""
    Progress("task", show=False).say("not shown")
    assert capsys.readouterr().err == ""


def test_a_table_of_few_columns_has_its_numbers_on_the_right(capsys):
    print_table(["name", "value"], [["a [b]", "1"], ["c", "100"]])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert re.search(r"a \[b\] +1$", "\n".join(lines), re.M)
    assert len({len(line) for line in lines if line.endswith(("1", "100"))}) == 1


def test_rich_is_imported_only_where_a_table_is_printed():
    code = "import sys, looptim.base.console; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
