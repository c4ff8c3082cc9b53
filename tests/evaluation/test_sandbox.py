"""Programs written by a model run apart, confined, and are judged by a process that they cannot reach."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from looptim.evaluation.sandbox import (
    CodeEval,
    Limits,
    check_isolation,
    confine,
    metric,
    run,
    run_program,
    syscalls,
    wire,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name != "posix", reason="limits of a process are POSIX"),
]
SHORT = Limits(seconds=1.0, memory=512 << 20, file_size=1000)
LINUX = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in syscalls.ARCHITECTURES,
    reason="Landlock and seccomp are Linux's",
)


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


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(a, b=2): return a + b", "assert f(1) == 3 and f(1, b=5) == 6"),
        ("def f(): return [(1, 'é'), {2: {3.5, None}}, True, b'x', 10**5000, range(3)]",
         "assert f() == [(1, 'é'), {2: {3.5, None}}, True, b'x', 10**5000, range(3)] and f()[2] is True"),
        ("def f(): return float('nan'), -float('inf')", "assert f()[0] != f()[0] and f()[1] == -float('inf')"),
        ("def f(): yield 1", "assert list(f()) == [1]"),
        ("def f(): return lambda x: x + 1", "assert f()(2) == 3 and sorted([3, 1], key=f()) == [1, 3]"),
        ("def f(): raise KeyError('x')", "try: f()\nexcept KeyError: pass\nelse: raise ValueError"),
        ("class Odd(Exception): pass\ndef f(): raise Odd",
         "try: f()\nexcept RuntimeError: pass\nelse: raise ValueError"),
        ("import math\nfrom typing import List\nONE = 1\ndef f(x): return x",
         "def g(x: List): pass\nassert math.pi and f(ONE) == 1"),
        ("from math import gcd, pi as abs\ndef f(): return 1", "assert gcd(4, 6) == 2 and abs(f()) == 1"),
        ("from math import gcd\ndef gcd(a, b): return 'own'", "assert gcd(4, 6) == 'own'"),
        ("state = []\ndef f(): state.append(1); return len(state)", "assert f() == 1 and f() == 2"),
        ("def sum(a, b): return a * b", "assert sum(2, 5) == 10"),
        ("from collections import Counter, deque\ndef f(): return Counter('aab'), deque([1])",
         "from collections import deque\nassert f()[0].most_common(1) == [('a', 2)] and f()[1] == deque([1])"),
        ("import fractions\ndef f(): return fractions.Fraction(1, 3), 2 + 1j",
         "assert f()[0] * 3 == 1 and f()[1].imag == 1"),
        ("import numpy as np\ndef f(): return np.float32(0.5), np.arange(2), np.int64(3)",
         "assert f() == (0.5, [0, 1], 3)"),
    ],
)  # fmt: skip
def test_a_test_sees_the_values_that_a_program_gives(program, test):
    outcome = run_program(program, test=test)
    assert outcome.passed, outcome.reason
    # And a test that would not see them would not fail.
    assert not run_program(program, SHORT, test=test + "\nassert False").passed


@pytest.mark.parametrize(
    "answer", [{"tuple": 1}, {"set": [[1]]}, {"os": "system"}, {"range": ["x"]}, {}, {"a": 1, "b": 2}]
)
def test_what_is_no_data_is_refused(answer):
    with pytest.raises((TypeError, ValueError, KeyError)):
        wire.decode(answer, function=print)


def test_an_object_that_says_it_equals_everything_is_no_answer():
    program = "class Any:\n    def __eq__(self, other): return True\ndef f(): return Any()"
    outcome = run_program(program, test="assert f() == 1")
    assert not outcome.passed and "a Any cannot be judged" in outcome.reason


def test_a_program_that_takes_off_its_alarm_is_killed():
    start = time.monotonic()
    outcome = run_program("import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(60)", SHORT)
    assert outcome.reason == "took longer than 1 s"
    # How it was confined is known all the same.
    assert outcome.isolation == run_program("pass", SHORT).isolation
    assert time.monotonic() - start < 20


def test_it_works_in_a_folder_of_its_own_and_sees_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.chdir(tmp_path)
    program = "import os\nassert 'SECRET' not in os.environ\nassert os.listdir('.') == []\nopen('here', 'w').write('x')"
    assert run_program(program, SHORT).passed
    files = "import os, tempfile\nos.makedirs('a/b')\nos.rename('a', 'c')\ntempfile.TemporaryFile().write(b'x')"
    assert run_program(files, SHORT).passed
    assert list(tmp_path.iterdir()) == []


def test_cleanup_takes_any_depth_and_follows_no_link(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    with run._folder() as folder:
        (folder / "link").symlink_to(tmp_path / "kept")
        handle = os.open(folder, os.O_RDONLY)
        for _ in range(1200):
            os.mkdir("d" * 100, 0o300, dir_fd=handle)
            (deeper, _) = os.open("d" * 100, os.O_PATH, dir_fd=handle), os.close(handle)
            handle = deeper
        os.close(handle)
        moved = folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "kept")
    assert list(moved.iterdir()) == [] and (tmp_path / "kept" / "file").exists()
    folder.unlink()


KINDS = {
    "read a secret file",
    "write outside",
    "append to a start-up file",
    "list the home",
    "open a TCP socket",
    "open a UDP socket",
    "open a unix socket",
    "signal the evaluator",
    "trace the evaluator",
    "read the environment of another process",
    "read the memory of another process",
    "fork",
    "start threads",
    "survive as a child",
    "exhaust memory",
    "exhaust the disk",
    "answer without end",
    "nest folders until cleanup fails",
    "swap the working folder for a link",
    "disable the timer",
    "claim to have passed",
}
"""What must be among the attacks; kinds of sockets and of bombs are programs of their own."""


@LINUX
@pytest.mark.parametrize("user", ["oneself", "an ordinary user"])
def test_hostile_programs_reach_nothing(user):
    pretend = {}
    python = sys.executable
    if user == "an ordinary user":
        if os.getuid() != 0:
            pytest.skip("the tests run as one")
        pretend = {"user": 65534, "group": 65534, "extra_groups": []}
        python = next((path for path in (sys.executable, "/usr/bin/python3") if _runs(path, pretend)), None)
        if python is None:
            pytest.skip("no Python that an ordinary user may run")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(run.__file__).parent, Path(folder) / "sandbox")
        script = shutil.copy(Path(__file__).with_name("hostile.py"), folder)
        os.chmod(folder, 0o755)
        done = subprocess.run([python, script, folder], cwd=folder, capture_output=True, text=True, **pretend)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer["isolation"]) >= confine.CONTAINED
    assert {name: how for name, how in answer["reached"].items() if how} == {}
    assert answer["reached"].keys() >= KINDS and len(answer["reached"]) == 30


def _runs(python, pretend):
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    try:
        return subprocess.run([python, "-c", check], cwd="/", capture_output=True, **pretend).returncode == 0
    except PermissionError:
        return False


@LINUX
def test_a_system_that_cannot_contain_programs_is_refused(monkeypatch):
    check_isolation()
    for missing in ("landlock", "seccomp"):
        less = f"; import sandbox.confine as confine; confine._{missing} = lambda: False; from"
        monkeypatch.setattr(run, "_START", run._START.replace("; from", less))
        with pytest.raises(ValueError, match=f"cannot contain programs .* for want of {missing}; .* --unisolated"):
            check_isolation()
        monkeypatch.undo()


def test_the_numbers_of_system_calls_are_the_kernels():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.is_file():
        pytest.skip("needs the headers of the kernel")
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())}
    for table in syscalls.numbers("x86_64"):
        assert {name: known[name] for name in table} == table
    generic = Path("/usr/include/asm-generic/unistd.h").read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", generic)}
    known |= {"newfstatat": known["fstatat"]}
    for table in syscalls.numbers("aarch64"):
        assert {name: known[name] for name in table} == table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slow"),
    [("openai/openai_humaneval", set()), ("evalplus/humanevalplus", {15, 32, 83, 130, 139})],
)
def test_reference_solutions_pass_and_others_do_not(solutions, name, slow):
    right, wrong, tests = solutions(name)
    limits = Limits(seconds=10)
    for index, test in enumerate(tests):
        # Some take longer than anybody waits, and the test of 32 is broken: they fail without a sandbox, too.
        if index not in slow:
            assert run_program(right[index], limits, test=test).passed, index
        assert not run_program(wrong[index], limits, test=test).passed, index


def test_the_stand_in_for_code_eval_gives_pass_at_k():
    metric = CodeEval(SHORT)
    scores, outcomes = metric.compute(
        ["assert f() == 1", "assert f() == 1"], [["def f(): return 1"], ["f = None"]], k=[1]
    )
    assert scores == {"pass@1": 0.5}
    assert [row[0].passed for row in outcomes.values()] == [True, False]
    assert metric.describe()["programs"] == 2
    assert metric.describe()["isolation"] == list(run_program("pass").isolation)


def test_a_program_that_is_not_started_is_no_wrong_answer(monkeypatch):
    never = run.Outcome(False, "did not start within 20 s", ())
    answers = [never, never, run.Outcome(True, "passed", ("limits",))]
    monkeypatch.setattr(metric, "run_program", lambda *arguments, **options: answers.pop(0))
    assert CodeEval().compute([""], [[""]])[0] == {"pass@1": 1.0}
    answers += [never] * 3
    with pytest.raises(ValueError, match="was not started within 20 s, 3 times"):
        CodeEval().compute([""], [[""]])
