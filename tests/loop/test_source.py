"""The code of a preset: what changes its hash, and what does not."""

import importlib.util
import sys

import pytest

import looptim as lo
from looptim.loop.source import code_of

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


@pytest.mark.parametrize("name", lo.PRESETS)
def test_shipped_presets_have_no_hash(name):
    assert code_of(name) is None


def test_without_a_file_it_is_the_function(monkeypatch):
    hashes = []
    for preset in ("vanilla", "huginn", "vanilla"):
        scope = {"lo": lo, "__name__": "nowhere"}
        exec(f"def mine(width, steps):\n    return lo.build('{preset}', width=width, steps=steps)", scope)
        monkeypatch.setitem(lo.PRESETS, "mine", scope["mine"])
        hashes.append(code_of("mine"))
    assert hashes[0] == hashes[2] != hashes[1]
