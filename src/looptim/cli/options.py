"""The arguments and options that several verbs share, and what a shell offers to complete them."""

from __future__ import annotations

from typing import Annotated

import typer


class StopError(Exception):
    """Ctrl-C, where there is more to say of it than that."""


def complete_recipe(start: str) -> list[str]:
    from ..recipe import shipped

    return [name for name in shipped("recipes") if name.startswith(start)]


def complete_study(start: str) -> list[str]:
    from ..recipe import shipped

    return [name for name in shipped("studies") if name.startswith(start)]


def complete_key(start: str) -> list[str]:
    from ..recipe import keys

    return [f"{key.name}=" for key in keys() if key.name.startswith(start)]


Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")]
Width = Annotated[int, typer.Option(help="Width d of the state.")]
Steps = Annotated[int, typer.Option(help="Number of loops R.")]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A shipped recipe, such as nano, or a TOML file.", autocompletion=complete_recipe
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the recipe; may be repeated.",
        autocompletion=complete_key,
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or a folder `looptim export` wrote.")]
DepthOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIGNAL:THRESHOLD", help="Let tokens leave the loop, as in residual:0.05[:MINIMUM[:MAXIMUM]]."
    ),
]
Loops = Annotated[
    int | None, typer.Option(min=1, help="Run this many loops instead of the layout's; needs a shared transition.")
]
