"""What the README and the docs say that their code blocks cannot check by running."""

import re
import runpy
from pathlib import Path

import pytest

import looptim
from looptim.loop import table as zoo
from looptim.recipe import keys

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()


def test_the_zoo_in_the_docs_is_the_zoo_in_the_code():
    assert zoo.markdown(zoo.zoo()) in (ROOT / "docs" / "zoo.md").read_text()


def test_every_recipe_key_is_in_the_site():
    hook = runpy.run_path(str(ROOT / "docs" / "api" / "hooks.py"))["on_page_markdown"]
    page = hook((ROOT / "docs" / "keys.md").read_text())
    assert all(f"\n| {key.name} | " in page for key in keys()) and "<!--" not in page


def test_every_environment_variable_is_in_the_docs():
    found = set()
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text()
        found |= set(re.findall(r"environ(?:\.get\(|\[|\.setdefault\()\"([A-Z_]+)\"", text))
        found |= set(re.findall(r"\b(?:LOOPTIM|HF|TRACKIO|WANDB)_[A-Z_]*[A-Z]\b", text))
    assert len(found) > 5
    text = (ROOT / "docs" / "faq.md").read_text()
    assert {name for name in found if f"`{name}`" not in text} == set()


def test_the_readme_shows_the_two_commands_and_fits_a_screen_and_a_half():
    assert "make demo" in README and "make test" in README
    assert len(README.splitlines()) <= 90


def links(text):
    return ["".join(each) for each in re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", text)]


def test_links_of_the_readme_lead_somewhere():
    ours = [link for link in links(README) if not link.startswith("https://arxiv.org/abs/2609.37379")]
    assert len(ours) > 20 and not [link for link in ours if not (ROOT / link).is_file()]


def test_links_of_the_readme_work_on_the_package_index_too():
    described = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["described"]
    assert described(README, {})["long_description"] == README
    built = described(README, {"GITHUB_REPOSITORY": "a/b", "GITHUB_REF_NAME": "v1.0"})
    assert built["project_urls"]["Repository"] == "https://github.com/a/b"
    found = links(built["long_description"])
    assert len(found) == len(links(README)) and all(link.startswith("https://") for link in found)
    assert {"https://github.com/a/b/blob/v1.0/docs/tutorial.md", "https://arxiv.org/abs/2609.37379"} <= set(found)
    pictures = [link for link in found if link.endswith(".png")]
    assert len(pictures) == 4 and all(link.startswith("https://github.com/a/b/raw/v1.0/docs/") for link in pictures)


@pytest.mark.parametrize("text", [README, RESULTS], ids=["readme", "results"])
def test_the_numbers_of_the_results_are_of_the_committed_studies(text):
    reread = (ROOT / "docs" / "results" / "reread.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|") and line.count("|") == 5]
    ours = [(row[3], row[4]) for row in rows if "±" in row[3]]
    assert len(ours) == 10
    for numbers, verdict in ours:
        lines = []
        for number in re.findall(r"[+-][\d.]+ ± [\d.]+", numbers):
            found = [line for line in reread.splitlines() if f" {number} " in line]
            assert found, f"{number} is not in reread.md"
            lines += found
        for seeds in re.findall(r"needs (\d+) seeds", verdict):
            assert any(line.endswith(f"| {seeds} |") for line in lines), f"{seeds} seeds: {lines}"


def test_the_table_of_results_is_the_same_in_both():
    tables = [re.search(r"(?m)^\| claim \|.*\n(?:\|.*\n)+", text)[0] for text in (README, RESULTS)]
    assert tables[0] == tables[1]


def test_the_version_stands_in_one_place():
    assert 'dynamic = ["version", ' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {looptim.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert "2609.37379" in (ROOT / "CITATION.cff").read_text()
