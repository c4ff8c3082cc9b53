"""Code by reference: the caller's runs, a file's does not until it is allowed, and what is wrong is a sentence."""

import importlib.metadata
import sys

import pytest
import torch

import looptim as lo
from looptim.base import code
from looptim.config import ModelConfig
from looptim.loop.registry import build_named, code_of

MINE = """
import looptim as lo

open("executed", "w").close()


def mine(width, steps, *, streams=2):
    \"\"\"A loop of my own.\"\"\"
    return lo.build("operloop", width=width, steps=steps, streams=streams)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file `my.py` in an otherwise empty current folder, of which nothing is allowed yet."""
    monkeypatch.setattr(code, "ALLOWED", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(MINE)
    yield tmp_path / "my.py"
    for name in [name for name in sys.modules if "of_a_test" in name]:
        del sys.modules[name]


def built(name):
    return build_named(name, width=8, steps=2)


def test_what_the_caller_names_runs(file):
    loop = lo.build("my.py:mine", width=8, steps=2, streams=3)
    assert (loop.name, loop.summary) == ("my.py:mine", "A loop of my own.")
    assert loop(torch.randn(1, 4, 8), torch.tanh).shape == (1, 4, 8)
    assert lo.build(f"{file}:mine", width=8, steps=2).name == f"{file}:mine"
    with pytest.raises(ValueError, match=r"my.py:mine has no option 'stream'; its options are streams"):
        lo.build("my.py:mine", width=8, steps=2, stream=3)


def test_a_module_is_found_in_the_current_folder_after_all_that_is_installed(file):
    (file.parent / "my_of_a_test.py").write_text(MINE)
    assert lo.build("my_of_a_test:mine", width=8, steps=2).name == "my_of_a_test:mine"
    assert sys.path[-1] == str(file.parent)


@pytest.mark.parametrize("name", ["my.py:mine", "./my.py:mine", "my:mine", "os:system"])
def test_what_a_file_names_does_not_run_until_it_is_allowed(file, name):
    place = name.partition(":")[0]
    with pytest.raises(ValueError, match=rf"{name} is code that a file asks for.* allow it with --import {place} or"):
        lo.LoopedLM(ModelConfig.tiny(loop={"preset": name}), seed=0)
    with pytest.raises(ValueError, match="is code that a file asks for"):
        code_of(name)
    assert not (file.parent / "executed").exists()


def test_imported_code_may_be_named_by_files_wherever_they_think_it_lies(file):
    lo.import_code("my.py")
    assert (file.parent / "executed").exists()
    for name in ("my.py:mine", "elsewhere/my.py:mine"):
        assert built(name).name == name
    for name in ("other.py:mine", "my:mine"):
        with pytest.raises(ValueError, match="is code that a file asks for"):
            built(name)


def test_of_two_files_of_one_name_each_is_itself(file):
    (file.parent / "b").mkdir()
    (file.parent / "b" / "my.py").write_text(MINE.replace('"operloop"', '"hyperloop"'))
    lo.import_code("my.py")
    lo.import_code("b/my.py")
    ours, theirs = built("my.py:mine"), built("b/my.py:mine")
    assert str(lo.describe(ours)) != str(lo.describe(theirs)).replace("b/my.py", "my.py")
    assert code_of("my.py:mine") != code_of("b/my.py:mine")
    with pytest.raises(ValueError, match="is code that a file asks for"):
        built("c/my.py:mine")


def test_an_edited_file_is_another_when_it_is_named_again_and_not_before(file):
    lo.build("my.py:mine", width=8, steps=2)
    before = code_of("my.py:mine")
    file.write_text(MINE.replace('"operloop"', '"hyperloop"'))
    assert code_of("my.py:mine") == before, "what was imported is still what runs"
    lo.load_config("nano", set=["loop.preset=my.py:mine"])
    assert code_of("my.py:mine") != before
    assert lo.diagnose(built("my.py:mine")).aligned is False


def test_with_a_package_its_modules_are_allowed(file):
    (file.parent / "pack_of_a_test").mkdir()
    (file.parent / "pack_of_a_test" / "__init__.py").write_text("")
    (file.parent / "pack_of_a_test" / "parts.py").write_text(MINE)
    lo.import_code("pack_of_a_test")
    assert built("pack_of_a_test.parts:mine").name == "pack_of_a_test.parts:mine"
    with pytest.raises(ValueError, match="is code that a file asks for"):
        built("pack_of_a_test_too:mine")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (MINE, "my.py:mne", "unknown function of my.py 'mne', did you mean 'mine'"),
        (MINE, "me.py:mine", r"there is no file .*me.py; give its full path"),
        (MINE, "nothing.at_all:mine", "there is no module 'nothing.at_all'"),
        ("def mine(:\n", "my.py:mine", r"my.py cannot be run \(SyntaxError"),
        ("import nothing_at_all", "my.py:mine", r"ModuleNotFoundError: No module named 'nothing_at_all'.*line 1"),
        ("x = 1\nx / 0", "my.py:mine", r"ZeroDivisionError: .*my.py, line 2\); fix it"),
        ("import sys; sys.exit(0)", "my.py:mine", r"cannot be run \(SystemExit"),
        ("def mine(width, steps): pass", "my.py:mine", "what the preset my.py:mine returns"),
    ],
)
def test_what_is_wrong_with_it_is_one_sentence(file, text, name, message):
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        lo.build(name, width=8, steps=2)
    assert "\n" not in str(error.value)


def test_an_installed_package_may_have_presets(file, monkeypatch):
    package = file.parent / "mine_of_a_test-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: mine_of_a_test\nVersion: 1\n")
    entries = package / "entry_points.txt"
    entries.write_text("[looptim.presets]\ninstalled = mine_of_a_test:mine\nbroken = mine_of_a_test:nothing\n")
    (file.parent / "mine_of_a_test.py").write_text(MINE)
    monkeypatch.syspath_prepend(file.parent)
    assert any(point.name == "installed" for point in importlib.metadata.entry_points(group="looptim.presets"))
    with pytest.raises(ValueError, match="did you mean 'installed'"):
        built("instaled")
    assert not (file.parent / "executed").exists()
    try:
        assert built("installed").name == "installed"
        assert code_of("installed") is not None
        with pytest.raises(ValueError, match=r"the preset broken of mine_of_a_test:nothing does not load"):
            built("broken")
        entries.write_text("[looptim.presets]\ninstalled = mine_of_a_test:mine\n")
        lo.PRESETS.pop("installed")
        assert "installed" in [row["name"] for row in lo.zoo(width=8, steps=2)]
    finally:
        lo.PRESETS.pop("installed", None)
