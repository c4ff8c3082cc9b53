"""The verbs that evaluate trained models and show results."""

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
        str | None, typer.Option(help="One of paper, commonsense, generation, ppl, reasoning.", metavar="NAME")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="lm-eval tasks to run; with --suite, only these tasks of the suite."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Evaluate only the first N problems of each task.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass; does not affect results.")] = 16,
    loops: Loops = None,
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Let HumanEval execute the code the model writes; see docs/evaluation.md."),
    ] = False,
    unisolated: Annotated[
        bool, typer.Option("--unisolated", help="With --allow-code, execute it even if no sandbox is available.")
    ] = False,
    depth: DepthOption = None,
    exits: Annotated[
        bool,
        typer.Option("--exits", help="Find early-exit thresholds on held-out text and report what they cost and save."),
    ] = False,
    risk: Annotated[
        float | None, typer.Option(metavar="X", help="With --exits, how much loss a threshold may cost. Default: 0.01.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Output folder. Default: RUN/eval.")] = None,
    json: Json = False,
) -> None:
    """Run the paper's benchmarks on a model. Each task is saved as it finishes; a rerun skips finished tasks."""
    import looptim

    from ..loop.depth import parse_depth

    if exits:
        if suite or tasks or depth or loops or limit or allow_code or unisolated:
            raise ValueError("--exits chooses depths on the run's own held-out text; leave the other options out")
        _evaluate_exits(run, out, json, risk)
        return
    if risk is not None:
        raise ValueError("--risk is what a threshold of an exit may cost; give --exits too")
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
    _print_place(answer, run, out)


def _evaluate_exits(run: str, out: str | None, json: bool, risk: float | None) -> None:
    """Choose exits, write the report beside the results, and print it."""
    from ..evaluation.exits import RISK, evaluate_exits
    from ..reporting.exits import report_exits

    record = evaluate_exits(run, out=out, risk=RISK if risk is None else risk)
    page = report_exits([record], Path(record["file"]).parent)
    if json:
        print_json(record)
        return
    print(page.with_name("exits.md").read_text(encoding="utf-8"))
    print(page)


def _print_scores(answer: Answer) -> None:
    """The scores of an evaluation as a table, and their averages."""
    print_table(answer.head, answer.rows)
    means = {name: value for name, value in answer["averages"].items() if value is not None}
    if means:
        print(", ".join(f"{name} {value:.2f}" for name, value in means.items()))


def _print_place(answer: Answer, run: str, out: str | None) -> None:
    from ..rundir import RunDir

    # A report is made of a run directory and finds results in its eval/ only.
    tables = out is None and RunDir(run).metrics.path.is_file()
    print(f"{answer['folder']}: written" + (f"; `looptim report {run}` makes the paper's tables" if tables else ""))


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run directories.")],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Output folder. Default for a single run: RUN/report.")
    ] = None,
    exits: Annotated[
        bool, typer.Option("--exits", help="Report the results of `evaluate --exits`, over runs and seeds.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Refresh the page every ten seconds until the runs finish or you press Ctrl-C."),
    ] = False,
) -> None:
    """Plot training runs as a web page. Evaluated runs also get the paper's tables, as Markdown, LaTeX and CSV."""
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
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text the model reads; - reads standard input.")],
    out: Annotated[str, typer.Option(metavar="FILE", help="Output file.")] = "look.html",
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="A second model to show side by side; needs the same tokenizer.")
    ] = None,
    loops: Loops = None,
    depth: Annotated[
        str | None,
        typer.Option(
            metavar="SIGNAL:THRESHOLD", help="Also let tokens leave the loop early, and show where each one did."
        ),
    ] = None,
) -> None:
    """Show what a model predicts after each loop. Writes one web page, with the state and the optimizer's view."""
    import looptim

    from ..loop.depth import parse_depth

    text = sys.stdin.read() if text == "-" else text
    leaves = None if depth is None else parse_depth(depth)
    print(looptim.look(run, text, out=out, against=against, loops=loops, depth=leaves).path)
