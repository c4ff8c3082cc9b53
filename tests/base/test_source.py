"""The code of a preset: what changes its hash, and what does not."""

import functools
import importlib.util
import os
import subprocess
import sys

import pytest

import looptim as lo
from looptim.base import source
from looptim.loop.registry import code_of

MINE = '''
import looptim as lo

SCALE = 1.0

def mine(width, steps):
    """A preset."""
    return lo.build("vanilla", width=width, steps=steps)

lo.PRESETS["mine"] = mine
'''


@pytest.fixture
def hash_of(tmp_path, monkeypatch):
    """The hash of the preset `mine` of a module with the given text."""
    monkeypatch.setitem(lo.PRESETS, "mine", None)

    def load(text):
        file = tmp_path / "mine_of_a_test.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, file.stem, module)
        exec(compile(text, str(file), "exec"), module.__dict__)
        return code_of("mine")

    return load


def test_an_edit_changes_the_hash_and_a_comment_does_not(hash_of):
    before = hash_of(MINE)
    assert before == hash_of(MINE + "\n# A remark.\n")
    assert before == hash_of(MINE + "\nprint('loaded')\n")
    assert before != hash_of(MINE.replace("vanilla", "huginn"))
    assert before != hash_of(MINE.replace("SCALE = 1.0", "SCALE = 2.0")), "which parts may use"


def test_files_of_ones_own_that_it_imports_count_too(hash_of, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "parts_of_a_test").mkdir()
    beside, inside, unused = (tmp_path / f"{name}.py" for name in ("beside_of_a_test", "parts_of_a_test/x", "unused"))
    imports = "import json, torch.nn\nfrom beside_of_a_test import SIZE\n"
    hashes = []
    for first, second, third in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)):
        (tmp_path / "parts_of_a_test" / "__init__.py").write_text("from .x import Y")
        beside.write_text(f"def late():\n    import parts_of_a_test\nSIZE = {first}")
        inside.write_text(f"Y = {second}")
        unused.write_text(f"Z = {third}")
        # Each is another Python.
        for name in ("beside_of_a_test", "parts_of_a_test", "parts_of_a_test.x"):
            sys.modules.pop(name, None)
        hashes.append(hash_of(imports + MINE))
    assert hashes[0] == hashes[3] == hashes[4]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("name", lo.PRESETS)
def test_shipped_presets_have_no_hash(name):
    assert code_of(name) is None


NOTEBOOK = """
import functools
import looptim as lo

LIMITS = {"a", "b", "c"}

class Own:
    FACTOR = 1.0

    @property
    def factor(self):
        return self.FACTOR * scaled(2) if "x" in {"a", "b", "c"} else LIMITS

def scaled(x):
    return (lambda y: y * x)(1.0)

def mine(width, steps):
    own = Own()
    return lo.build("vanilla", width=width, steps=steps)

def unused():
    return 1
"""


def hash_in_notebook(text, monkeypatch):
    scope = {"__name__": "nowhere"}
    exec(text, scope)
    monkeypatch.setitem(lo.PRESETS, "mine", scope["mine"])
    return code_of("mine")


def test_without_a_file_it_is_the_function_and_all_that_it_names(monkeypatch):
    first = hash_in_notebook(NOTEBOOK, monkeypatch)
    same = (
        NOTEBOOK.replace("return 1\n", "return 2\n"),
        NOTEBOOK.replace("own = Own()", "# A remark.\n    own = Own()"),
    )
    assert [hash_in_notebook(text, monkeypatch) for text in same] == [first, first]
    edits = [("vanilla", "huginn"), ("FACTOR = 1.0", "FACTOR = 2.0"), ("(1.0)", "(2.0)"), ('"c"}\n', '"d"}\n')]
    edited = {hash_in_notebook(NOTEBOOK.replace(*edit), monkeypatch) for edit in edits}
    assert len(edited | {first}) == len(edits) + 1


def test_without_a_file_it_is_the_same_in_every_process():
    program = f"{NOTEBOOK}\nfrom looptim.base.source import hash_of\nprint(hash_of(mine))"
    found = {
        subprocess.run(
            [sys.executable, "-"],
            input=program,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1 and len(found.pop().strip()) == 16


def test_what_a_partial_was_given_counts(monkeypatch):
    hashes = []
    for streams in (2, 3, 2):
        monkeypatch.setitem(lo.PRESETS, "mine", functools.partial(lo.presets.operloop, streams=streams))
        hashes.append(code_of("mine"))
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_preset_keeps_the_hash_it_was_entered_with(hash_of, tmp_path):
    before = hash_of(MINE)
    (tmp_path / "mine_of_a_test.py").write_text(MINE.replace("vanilla", "huginn"))
    assert code_of("mine") == before, "what was imported is still what runs"


def test_what_runs_counts_and_not_what_an_edit_made_of_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    beside, file = tmp_path / "beside_the_edited.py", tmp_path / "edited_in_a_living_python.py"
    beside.write_text("PRESET = 'vanilla'\n")
    text = MINE.replace('"vanilla"', "beside_the_edited.PRESET").replace(
        "import loop", "import beside_the_edited, loop"
    )
    file.write_text(text)
    monkeypatch.setitem(lo.PRESETS, "mine", None)

    def now():
        lo.build("edited_in_a_living_python:mine", width=8, steps=2)
        return code_of("edited_in_a_living_python:mine"), "restart Python" in capsys.readouterr().err

    first = now()
    assert not first[1]
    file.write_text("# A remark.\n" + text)
    assert now() == first
    file.write_text(text.replace("steps=steps", "steps=+steps"))
    assert now() == (first[0], True), "what was imported runs on"
    importlib.reload(sys.modules["edited_in_a_living_python"])
    second = now()
    assert second[0] != first[0] and not second[1]
    # It is asked for the first time after an edit: what runs is in no file any more.
    importlib.reload(sys.modules["beside_the_edited"])
    beside.write_text("PRESET = 'huginn'\n")
    third = now()
    assert third[0] not in (first[0], second[0])
    beside.write_text("PRESET = 'vanilla'\n")
    assert now() == third
    importlib.reload(sys.modules["beside_the_edited"])
    assert now() == second
    for name in ("edited_in_a_living_python", "beside_the_edited"):
        monkeypatch.delitem(sys.modules, name)
        source.RUNNING.pop(name, None)
