"""The rules of the house that a machine can check: sizes, names, imports, spelling, and where things live."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import looptim as lo
from looptim.cli import app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "looptim"
MODULES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]

BRITISH = re.compile(
    r"\b\w*(?:colour|behaviour|neighbour|favour|honour|centre|normalis|initialis|synchronis|orthogonalis|tokenis|optimis(?!m|t)"
    r"|recognis|serialis|regularis|organis(?!m)|summaris|parallelis(?!m)|materialis|quantis|discretis|factoris|catalogue|modell)\w*",
    re.IGNORECASE,
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_and_functions_can_be_held_in_mind():
    long = [name_of(path) for path in MODULES if path.read_text().count("\n") > 350]
    for path in MODULES:
        functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
        long += [f"{name_of(path)}: {node.name}" for node in functions if node.end_lineno - node.lineno >= 64]
    assert not long


def test_comments_are_sentences():
    """A comment of three words has no subject; and nothing is left to do."""
    wrong = []
    for path in MODULES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            comment = re.match(r"\s*# (?!type:|noqa|pyright|fmt)(.+)$", line)
            if comment:
                undone = re.match(r"(TODO|FIXME|XXX|HACK)\b", comment[1])
                fragment = len(comment[1].split()) <= 3 and comment[1][0].isupper()
                wrong += [f"{name_of(path)}, line {number}: {comment[1]}"] if undone or fragment else []
    assert not wrong


def test_spelling_is_american():
    texts = {name_of(path): path.read_text() for path in [*MODULES, *TESTS, *DOCS] if path.name != Path(__file__).name}
    assert not {name: found for name, text in texts.items() if (found := BRITISH.findall(text))}


def test_prose_has_lines_of_less_than_120_characters():
    for path in DOCS:
        lines = path.read_text().splitlines()
        long = [number for number, line in enumerate(lines, 1) if len(line) >= 120 and not line.startswith("|")]
        assert not long, path


def test_no_test_module_imports_another_or_reaches_into_loaded_modules():
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("test_"), path
        assert 'sys.modules["looptim' not in path.read_text() or path.name == Path(__file__).name, path


def test_the_root_has_few_modules():
    assert len(list(SOURCE.glob("*.py"))) <= 9


@pytest.mark.long
def test_packages_are_modules_in_a_fresh_process_and_no_verb_hides_one():
    names = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    names += sorted(path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__"))
    assert {"training", "data", "hf", "evaluation", "reporting", "studies"} <= set(names)
    assert not set(names) & set(lo._HOMES)
    imports = "".join(f"import looptim.{name}\nassert type(looptim.{name}) is type(sys), {name!r}\n" for name in names)
    done = subprocess.run([sys.executable, "-c", f"import sys\n{imports}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_verb_is_a_function_of_the_api():
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    # These lists and dialogues are for people at a terminal.
    verbs -= {"recipes", "demo", "chat", "serve", "doctor"}
    # Two verbs have the name of a module, which a function of the API must not have.
    names = {{"loop": "loop_model", "config": "load_config"}.get(verb, verb) for verb in verbs}
    assert names <= set(dir(lo))
    assert all(callable(getattr(lo, name)) for name in names)


def test_the_extension_guide_names_files_that_exist():
    guide = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where a new thing goes")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in guide.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 8
    for _, home, touched in rows:
        files = list(re.findall(r"`([\w/]+\.py)`", home))
        assert all((SOURCE / name).is_file() for name in files), files
        assert len(files) >= int(touched)
