"""Transformers' own tests of models, from its source distribution, on ours; writes a table of docs/transformers.md."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import transformers
from support import REPO

PRESETS = ["operloop", "hyperloop", "parcae", "huginn", "recurrentgpt", "vanilla"]
EXPECTED_FAILURES = {
    "test_correct_missing_keys": "it loads a file that lacks weights, which we refuse",
    "test_generation_tester_mixin_inheritance": "the tests of `generate` are not in the source distribution",
    "test_gradient_checkpointing_enable_disable": "it looks for layers that recompute themselves; our model does it",
    "test_training_gradient_checkpointing": "the same; `tests/hf/test_model.py` compares the gradients",
    "test_training_gradient_checkpointing_use_reentrant_false": "the same",
    "test_training_gradient_checkpointing_use_reentrant_true": "the same",
    "test_model_weights_reload_no_missing_tied_weights": "it loads a file without weights, which we refuse",
    "test_num_layers_is_small": "a loop with a prelude and a coda has more than the two layers it allows",
    "test_training": "it asks the body for a loss, which it knows to leave out for its own classes only",
}
STUBS = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}
"""Modules that only a checkout has and not the source distribution, and the class each of them has."""


def source(folder: Path) -> Path:
    """The tests of the source distribution of the transformers that is installed."""
    given = os.environ.get("LOOPTIM_TRANSFORMERS_SOURCE")
    if given:
        return Path(given) / "tests"
    name = f"transformers=={transformers.__version__}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    done = subprocess.run([*command, name, "-d", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip could not download the source of {name}; set LOOPTIM_TRANSFORMERS_SOURCE to a folder with it")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("transformers-*/tests"))


def outcomes(report: Path) -> dict[str, dict[str, str]]:
    """What became of each test, by preset; a test of which a part failed has failed."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for case in ElementTree.parse(report).iter("testcase"):
        preset = case.get("classname", "").rpartition("Test_")[2]
        kinds = {child.tag for child in case}
        outcome = "fail" if kinds & {"failure", "error"} else "skip" if "skipped" in kinds else "pass"
        if found[preset].get(case.get("name")) != "fail":
            found[preset][case.get("name")] = outcome
    return found


@pytest.mark.slow
def test_the_common_tests_of_transformers(tmp_path):
    pytest.importorskip("parameterized", reason="transformers' tests need the package parameterized")
    shutil.copytree(source(tmp_path), tmp_path / "run" / "tests")
    reasons = dict(EXPECTED_FAILURES)
    if (tmp_path / "run" / "tests" / "generation" / "test_utils.py").exists():
        # A checkout has the tests of `generate`, which are then claimed.
        del reasons["test_generation_tester_mixin_inheritance"]
    for path, name in STUBS.items():
        stub = tmp_path / "run" / "tests" / path
        stub.parent.mkdir(exist_ok=True)
        if not stub.exists():
            stub.write_text(f"class {name}:\n    pass\n")
    shutil.copy(Path(__file__).with_name("common_suite.py"), tmp_path / "run" / "test_suite.py")
    paths = os.pathsep.join([str(tmp_path / "run"), str(REPO / "tests"), str(REPO / "src")])
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_suite.py", "--junitxml=report.xml"],
        cwd=tmp_path / "run",
        env=os.environ | {"PYTHONPATH": paths, "LOOPTIM_PRESETS": ",".join(PRESETS), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
    )
    found = outcomes(tmp_path / "run" / "report.xml")
    assert set(found) == set(PRESETS)
    failed = {name for tests in found.values() for name, outcome in tests.items() if outcome == "fail"}
    assert failed == set(reasons)
    write_table({preset: Counter(tests.values()) for preset, tests in found.items()}, reasons)


def write_table(counts: dict[str, Counter], reasons: dict[str, str]) -> None:
    """Put the numbers, and the reasons of the failures, into the documentation."""
    lines = [f"Transformers {transformers.__version__}:", "", "| preset | pass | skip | fail |", "|---|---|---|---|"]
    lines += [f"| {preset} | {each['pass']} | {each['skip']} | {each['fail']} |" for preset, each in counts.items()]
    lines += ["", "| fails | why |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in reasons.items()]
    table = "\n".join(lines)
    page = REPO / "docs" / "transformers.md"
    text = page.read_text(encoding="utf-8")
    assert "<!-- common tests -->" in text
    pattern = r"(<!-- common tests -->\n).*?(\n<!-- end -->)"
    page.write_text(re.sub(pattern, lambda match: match[1] + table + match[2], text, flags=re.S), encoding="utf-8")
