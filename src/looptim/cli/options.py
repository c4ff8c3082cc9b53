"""The arguments and options that several verbs share, and what a shell offers to complete them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..base.code import ALLOWED, EVERYTHING, import_code


class StopError(Exception):
    """Raised on Ctrl-C if the user should be told more than that the command has stopped."""


def complete_recipe(start: str) -> list[str]:
    from ..recipe import shipped

    return [name for name in shipped("recipes") if name.startswith(start)]


def complete_study(start: str) -> list[str]:
    from ..recipe import shipped

    return [name for name in shipped("studies") if name.startswith(start)]


def complete_key(start: str) -> list[str]:
    from ..recipe import keys

    return [f"{key.name}=" for key in keys() if key.name.startswith(start)]


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")]
Width = Annotated[int, typer.Option(help="Width d of the hidden state.")]
Steps = Annotated[int, typer.Option(help="Number of loops R.")]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A shipped recipe, such as nano, or the path of a TOML file.",
        autocompletion=complete_recipe,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a recipe key; may be repeated.",
        autocompletion=complete_key,
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run directory, or a model folder written by `looptim export` or `looptim loop`."
    ),
]
DepthOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIGNAL:THRESHOLD",
        help="Let tokens leave the loop early, as in residual:0.05[:MINIMUM[:MAXIMUM[:repeat]]], or residual+1:0.05.",
    ),
]
Loops = Annotated[
    int | None,
    typer.Option(min=1, help="Run this many loops; more than in training needs a transition that all loops share."),
]
Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="CODE",
        help="Import your own module or file.py first, for the presets it defines; may be repeated.",
    ),
]
TrustCode = Annotated[bool, typer.Option("--trust-code", help="Allow runs and recipes to execute any code they name.")]


def takes_code(verb: Callable[..., None]) -> Callable[..., None]:
    """Add the options `--import` and `--trust-code` to a verb; both take effect before it begins."""

    @functools.wraps(verb)
    def after_code(*, import_: list[str] | None, trust_code: bool, **arguments: Any) -> None:
        if trust_code:
            ALLOWED[EVERYTHING] = None
        for place in import_ or ():
            import_code(place)
        verb(**arguments)

    own = inspect.signature(verb, eval_str=True).parameters.values()
    more = {"import_": (None, Import), "trust_code": (False, TrustCode)}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (default, annotation) in more.items()
    ]
    # Typer reads a function's signature, not its code.
    vars(after_code)["__signature__"] = inspect.Signature([*own, *options])
    return after_code
