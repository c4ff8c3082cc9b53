"""What the README says that its code blocks cannot check by running."""

from pathlib import Path

from looptim.loop import table as zoo

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_zoo_in_the_readme_is_the_zoo_in_the_code():
    assert zoo.markdown(zoo.zoo()) in README


def test_the_readme_shows_the_two_commands():
    assert "make demo" in README
    assert "make test" in README


def test_the_version_stands_in_one_place():
    import looptim

    root = Path(__file__).parents[1]
    assert 'dynamic = ["version"]' in (root / "pyproject.toml").read_text()
    assert f"version: {looptim.__version__}\n" in (root / "CITATION.cff").read_text()
    assert "2609.37379" in (root / "CITATION.cff").read_text()
