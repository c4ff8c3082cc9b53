"""The report of one or several runs: figures, the paper's tables of those evaluated, and a page with all of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ..rundir import Run, RunDir
from .charts import run_page
from .page import write_report
from .paper_tables import tables_of
from .plots import FIGURES, draw, render
from .runs import read_runs
from .tables import FORMATS
from .template import PagePath


def report(
    run_dirs: str | Path | Sequence[str | Path], out: str | Path | None = None, *, watch: float | None = None
) -> Path:
    """Write what runs did into `out`, and return the path of the self-contained page, index.html.

    Figures go beside it, and the paper's tables (Markdown, LaTeX, CSV) of the runs that were evaluated. One run's
    report goes into RUN/report by default. Files are replaced whole, after all of them could be written. `watch` writes
    the page anew every so many seconds until the runs are done; one that is open in a browser follows by itself.
    """
    folders = [Path(run_dirs)] if isinstance(run_dirs, str | Path) else [Path(folder) for folder in run_dirs]
    if not folders:
        raise ValueError("a report needs at least one run directory, got none; give the folder of a run")
    if out is None and len(folders) > 1:
        raise ValueError(f"a report of {len(folders)} runs needs a folder of its own; give one with out (--out DIR)")
    out = RunDir(folders[0]).report if out is None else Path(out)
    if watch is not None:
        _watch(folders, out, watch)
    runs, tables = read_runs(folders), tables_of(folders)
    _, files = render(lambda: draw(runs))
    files |= {f"tables.{suffix}": form(tables).encode() for suffix, form in FORMATS.items()} if tables else {}
    files["index.html"] = run_page(folders, runs, tables).html().encode()
    write_report(out, files, figures=FIGURES)
    return PagePath(out / "index.html")


def _watch(folders: Sequence[Path], out: Path, seconds: float) -> None:
    """Update only the page until the runs are done, or Ctrl-C, since figures take their time."""
    if seconds <= 0:
        raise ValueError(f"a report is written anew every so many seconds, more than none; got {seconds}")
    try:
        while any(folder.is_dir() and not RunDir(folder).metrics.last("tokens") for folder in folders):
            time.sleep(min(seconds, 1))
        while not all(map(_is_done, runs := read_runs(folders))):
            page = run_page(folders, runs, tables_of(folders), watch=seconds)
            write_report(out, {"index.html": page.html().encode()}, figures=())
            time.sleep(seconds)
    except KeyboardInterrupt:
        # A full report is written at the end, and an open page must stop refreshing.
        return


def _is_done(run: Run) -> bool:
    """Whether a run has reached its last step; a run whose recipe does not load is not waited for."""
    return run.lines[-1]["step"] >= run.config.get("train.steps", 0)
