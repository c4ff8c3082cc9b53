"""The verbs that judge what was trained, and show it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..base.console import print_json, print_table
from ..base.markup import Answer
from .options import DepthOption, Json, Loops, Run


def evaluate(
    run: Run,
    suite: Annotated[
        str | None, typer.Option(help="paper, commonsense, generation, ppl or reasoning.", metavar="NAME")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Tasks of lm-eval; with --suite, those of its tasks to run.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Evaluate the first N problems of each task only.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward; results do not depend on it.")] = 16,
    loops: Loops = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let HumanEval execute what the model writes; see docs/evaluation.md.")
    ] = False,
    unisolated: Annotated[
        bool, typer.Option("--unisolated", help="With --allow-code, execute it even where nothing can contain it.")
    ] = False,
    depth: DepthOption = None,
    exits: Annotated[
        bool, typer.Option("--exits", help="Choose thresholds at which tokens leave the loop, and report on them.")
    ] = False,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Where results go; RUN/eval by default.")] = None,
    json: Json = False,
) -> None:
    """Run the paper's benchmarks; each task is written as it finishes, and a rerun skips what is done."""
    import looptim

    from ..loop.depth import parse_depth
    from ..rundir import RunDir

    if exits:
        if suite or tasks or depth or loops:
            raise ValueError("--exits chooses depths on the run's own held-out text; leave the other options out")
        _evaluate_exits(run, out, json)
        return
    if unisolated and not allow_code:
        raise ValueError("--unisolated is about executing code; give --allow-code too")
    names = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    answer = looptim.evaluate(
        run,
        suite=suite,
        tasks=names,
        limit=limit,
        batch_size=batch_size,
        loops=loops,
        depth=None if depth is None else parse_depth(depth),
        allow_code="unisolated" if unisolated else allow_code,
        out=out,
    )
    if json:
        print_json(answer)
        return
    _print_scores(answer)
    # A report is made of a run directory and finds results in its eval/ only.
    tables = out is None and RunDir(run).metrics.path.is_file()
    print(f"{answer['folder']}: written" + (f"; `looptim report {run}` makes the paper's tables" if tables else ""))


def _evaluate_exits(run: str, out: str | None, json: bool) -> None:
    """Choose exits, write the report beside the results, and print it."""
    from ..evaluation.exits import evaluate_exits
    from ..reporting.exits import report_exits

    record = evaluate_exits(run, out=out)
    page = report_exits([record], Path(record["file"]).parent)
    if json:
        print_json(record)
    else:
        print(page.with_name("exits.md").read_text(encoding="utf-8"))
    print(page)


def _print_scores(answer: Answer) -> None:
    """The scores of an evaluation as a table, and their averages."""
    print_table(answer.head, answer.rows)
    means = {name: value for name, value in answer["averages"].items() if value is not None}
    if means:
        print(", ".join(f"{name} {value:.2f}" for name, value in means.items()))


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run directories.")],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the report goes; for one run, RUN/report by default.")
    ] = None,
    exits: Annotated[
        bool, typer.Option("--exits", help="Report on what `evaluate --exits` found, over runs and seeds.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the page anew every ten seconds until the runs are done, or Ctrl-C.")
    ] = False,
) -> None:
    """Draw what runs did; print and write the paper's tables (Markdown, LaTeX, CSV) of those that were evaluated."""
    import looptim

    if exits:
        from ..reporting.exits import read_exits, report_exits

        if out is None:
            raise ValueError("a report on exits needs a folder; give --out")
        print(report_exits(read_exits(runs), out))
        return
    page = looptim.report(runs, out, watch=10.0 if watch else None)
    tables = page.with_name("tables.md")
    if tables.is_file():
        print(tables.read_text(encoding="utf-8"))
    for path in (page, *(page.with_name(f"tables.{suffix}") for suffix in ("md", "tex", "csv"))):
        if path.is_file():
            print(path)


def look(
    run: Run,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model reads; - reads it from standard input.")],
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the page goes.")] = "look.html",
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="Another model with the same tokenizer, to stand beside it.")
    ] = None,
    loops: Loops = None,
    depth: Annotated[
        str | None,
        typer.Option(metavar="SIGNAL:THRESHOLD", help="Also let tokens leave the loop, and show where each did."),
    ] = None,
) -> None:
    """Show what a model would say after each loop, and how its state gets there, as one page for a browser."""
    import looptim

    from ..loop.depth import parse_depth

    text = sys.stdin.read() if text == "-" else text
    leaves = None if depth is None else parse_depth(depth)
    print(looptim.look(run, text, out=out, against=against, loops=loops, depth=leaves).path)
