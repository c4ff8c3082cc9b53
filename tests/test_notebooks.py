"""The notebook runs as it stands, and what a notebook shows of looptim is a table, not a dump."""

import pytest
import torch
from support import REPO

import looptim as lo
from looptim.data import Tokenizer
from looptim.reporting.tables import Cell, Table

NOTEBOOKS = sorted((REPO / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    notebook = nbformat.read(path, as_version=4)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code"), "commit it executed"
    kinds = [[output.output_type for output in cell.get("outputs", [])] for cell in notebook.cells]
    client(notebook, timeout=300, kernel_name="python3").execute()
    again = [
        [output.output_type for output in cell.get("outputs", []) if output.get("name") != "stderr"]
        for cell in notebook.cells
    ]
    assert again == kinds


def test_what_a_notebook_shows():
    loop = lo.build("hyperloop", width=8, steps=2)
    with lo.trace(loop) as trace:
        loop(torch.randn(1, 3, 8), torch.tanh)
    model = lo.LoopedLM(lo.ModelConfig.tiny(), seed=0)
    shown = {
        "H_pre Y": loop,
        "mismatch with the projection": lo.describe(loop),
        "reads through H_pre but writes through H_post": lo.diagnose(loop),
        "non-vocabulary without norms": lo.count(lo.ModelConfig.tiny()),
        "objective": trace,
        "<b>75.62</b>": Table("t", "Title", ["Task", "run"], [["PIQA", Cell(75.625, None, "bold")]], []),
        "iframe": lo.look(model, "abc", tokenizer=Tokenizer.bytes()),
    }
    for text, value in shown.items():
        assert text in value._repr_html_(), value


def test_names_are_text():
    loop = lo.build("vanilla", width=8, steps=2)
    loop.name = "<script>"
    assert "<script>" not in loop._repr_html_() and "<script>" not in lo.diagnose(loop)._repr_html_()


def test_a_trace_prints_the_means_of_its_steps():
    loop = lo.build("operloop", width=8, steps=2)
    with lo.trace(loop) as trace:
        loop(torch.randn(1, 3, 8), torch.tanh)
    head, _, *rows = repr(trace).splitlines()
    assert head == "Trace of 2 steps, state 1x3x4x8; means over tokens:" and len(rows) == 2
    assert float(rows[1].split()[2]) == pytest.approx(trace.step_size[1].mean().item(), rel=1e-3)
    assert repr(type(trace)()).startswith("Trace of 0 steps")
