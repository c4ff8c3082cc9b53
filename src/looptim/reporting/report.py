"""The report of one or several runs: figures, the paper's tables of those evaluated, and a page with all of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..rundir import RunDir
from .page import run_page, write_report
from .paper_tables import tables_of
from .plots import FIGURES, draw, render
from .runs import read_runs
from .tables import FORMATS, html_text


def report(run_dirs: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write what runs did into `out`, and return the path of the self-contained page, index.html.

    Figures go beside it, and the paper's tables (Markdown, LaTeX, CSV) of the runs that were evaluated. One run's
    report goes into RUN/report by default. Files are replaced whole, after all of them could be written.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, str | Path) else [Path(folder) for folder in run_dirs]
    if not folders:
        raise ValueError("a report needs at least one run directory, got none; give the folder of a run")
    if out is None and len(folders) > 1:
        raise ValueError(f"a report of {len(folders)} runs needs a folder of its own; give one with out (--out DIR)")
    runs, tables = read_runs(folders), tables_of(folders)
    out = RunDir(folders[0]).report if out is None else Path(out)
    pictures, files = render(lambda: draw(runs))
    files |= {f"tables.{suffix}": form(tables).encode() for suffix, form in FORMATS.items()} if tables else {}
    files["index.html"] = run_page(runs, pictures, files, html_text(tables)).encode()
    write_report(out, files, figures=FIGURES)
    return out / "index.html"
