"""The verbs that train models."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Recipe, Set, StopError, complete_study

if TYPE_CHECKING:
    from ..config import Config


def demo(
    out: Annotated[str, typer.Option(metavar="DIR", help="Output folder for runs and pages.")] = "runs/demo",
) -> None:
    """Take a tour of looptim in a few minutes. Finds a mismatch, trains two small models, and looks inside one."""
    import looptim

    looptim.demo(out)


def train(
    recipe: Recipe,
    out: Annotated[str, typer.Option(metavar="DIR", help="Run directory to create or resume.")],
    set: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Resume even if the config has changed.")] = False,
    export: Annotated[bool, typer.Option(help="Export DIR/model for transformers at the end.")] = True,
) -> None:
    """Train a recipe's model and export it for transformers. Use torchrun for several processes."""
    import looptim

    from ..training.distributed import ElsewhereError

    # A missing package is reported now, not when the training is over.
    if export and importlib.util.find_spec("transformers") is None:
        raise ValueError("the export at the end needs transformers; pip install 'looptim[hf]', or give --no-export")

    try:
        run = looptim.train(_load_once(recipe, set or ()), out, resume=resume, force=force)
    except KeyboardInterrupt:
        raise StopError(f"stopped; the same command with --resume continues {out}") from None
    except ElsewhereError:
        # The process that failed has printed the reason.
        raise typer.Exit(2) from None
    if export and os.environ.get("RANK", "0") == "0":
        print(f"{run}: trained; {looptim.export(run)} loads in transformers")


def _load_once(recipe: str, set: list[str] | tuple[str, ...]) -> Config:
    """The config of a recipe; of many processes the first says what is wrong with it, and the others stop."""
    from ..recipe import load_config

    if "RANK" in os.environ:
        from ..training import distributed

        distributed.start().first_does(lambda: load_config(recipe, set=set))
    return load_config(recipe, set=set)


def study(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A shipped study, such as main, or the path of a TOML file.",
            autocompletion=complete_study,
        ),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Output folder for tables, figures and the page.")],
    scale: Annotated[
        str | None, typer.Option(help="A scale defined in the study file, such as smoke.", metavar="NAME")
    ] = None,
    set: Set = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Take only variants of this name, such as 'vanilla*'; may be repeated."),
    ] = None,
    runs: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder for the runs, which several studies may share. Default: DIR/runs."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Number of runs to train at the same time; 0 only refreshes the page.")] = 1,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh the page about every ten seconds while the runs train.")
    ] = False,
    launcher: Annotated[
        str | None, typer.Option(metavar="slurm", help="Submit the runs to SLURM as an array of jobs, and return.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Option for sbatch, such as --sbatch=--time=4:00:00; may be repeated."),
    ] = None,
) -> None:
    """Compare transitions over several seeds. Run the same command again to resume; finished runs are kept."""
    import looptim

    if launcher not in (None, "slurm") or (sbatch and launcher is None):
        raise ValueError(f"--launcher is slurm or left out, and --sbatch goes with it; got {launcher!r}")
    if watch and (launcher or not jobs):
        raise ValueError("--watch follows runs that this command trains; leave out --launcher and --jobs 0")
    taken: dict[str, Any] = {"scale": scale, "set": set or (), "only": only or ()}
    if launcher is not None:
        from ..studies.slurm import submit

        ids = submit(file, out, **taken, runs=runs, jobs=jobs, sbatch=sbatch or ())
        print(f"submitted {', '.join(ids)}; the last writes {out}/index.html when the others are done")
        return
    try:
        page = looptim.study(file, out, **taken, runs=runs, jobs=jobs, watch=10.0 if watch else None)
    except KeyboardInterrupt:
        raise StopError(f"stopped; the same command continues {out}") from None
    print((page.parent / "results.md").read_text(encoding="utf-8"))
    print(page)


def doctor() -> None:
    """Check that this machine has what looptim needs."""
    from ..training.doctor import examine

    failed = 0
    for finding in examine():
        mark = {True: "ok  ", False: "FAIL", None: "skip"}[finding.ok]
        print(f"{mark}  {finding.name}: {finding.said}", flush=True)
        failed += finding.ok is False
    if failed:
        raise ValueError(f"{failed} of the checks failed; docs/gpu.md says what each needs")
