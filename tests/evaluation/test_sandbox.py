"""Programs written by a model are run apart, with limits."""

import os
import socket
import sys
import time

import pytest

from looptim.evaluation import sandbox
from looptim.evaluation.sandbox import CodeEval, Limits, run_program

pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits of a process are POSIX")
SHORT = Limits(seconds=1.0, memory=512 << 20, file_size=1000)


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 + 1 == 3",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "syntax error",
        "while True: pass",
        "x = bytearray(2 << 30)",
        "with open('large', 'w') as file: file.write('x' * 5000)",
        "input()",
    ],
)
def test_what_fails_or_leaves_early_does_not_pass(program):
    outcome = run_program(program, SHORT)
    assert not outcome.passed
    assert outcome.reason != "passed"


def test_a_good_program_passes_with_imports_and_output():
    assert run_program("import math, collections\nprint('x' * 100000)\nassert math.gcd(4, 6) == 2", SHORT).passed


def test_a_program_runs_as_in_code_eval():
    assert not run_program("def f(x: Undefined): pass", SHORT).passed
    assert run_program("if __name__ == '__main__': raise ValueError", SHORT).passed


def test_a_program_that_takes_off_its_alarm_is_killed(monkeypatch):
    monkeypatch.setattr(sandbox, "GRACE", 0.5)
    start = time.monotonic()
    outcome = run_program("import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(60)", SHORT)
    assert not outcome.passed
    # That it was cut off from the network is known all the same.
    assert outcome.network == run_program("pass", SHORT).network
    assert time.monotonic() - start < 20


def test_it_works_in_a_folder_of_its_own_and_sees_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.chdir(tmp_path)
    program = "import os\nassert 'SECRET' not in os.environ\nassert os.listdir('.') == []\nopen('here', 'w').write('x')"
    assert run_program(program, SHORT).passed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_it_has_no_network_where_the_system_allows():
    connect = """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), 1)
except OSError:
    pass
else:
    raise ValueError
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run_program(connect.replace("PORT", str(server.getsockname()[1])), SHORT)
    if outcome.network:
        pytest.skip("this system does not let a process leave the network")
    assert outcome.passed


def test_the_stand_in_for_code_eval_gives_pass_at_k():
    metric = CodeEval(SHORT)
    scores, outcomes = metric.compute(
        ["assert f() == 1", "assert f() == 1"], [["def f(): return 1"], ["f = None"]], k=[1]
    )
    assert scores == {"pass@1": 0.5}
    assert [row[0].passed for row in outcomes.values()] == [True, False]
    assert metric.describe()["programs"] == 2
