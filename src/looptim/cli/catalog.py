"""The verbs that list what looptim has: transitions, recipes, recipe keys."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated

import typer

from ..base.console import print_json, print_table
from ..base.markup import markdown_table
from .options import Json, Markdown, Set, Steps, Width, complete_recipe


def zoo(
    json: Json = False,
    markdown: Markdown = False,
    width: Width = 64,
    steps: Steps = 3,
) -> None:
    """List every transition as an optimizer. This is the paper's comparison table, generated from the code."""
    if json and markdown:
        raise ValueError("--json and --markdown exclude each other; give one")
    from ..loop import table

    rows = table.zoo(width, steps)
    if json:
        print_json(rows)
    elif markdown:
        print(table.markdown(rows))
    else:
        if sys.stdout.isatty() and shutil.get_terminal_size().columns < 180:
            print(table.narrow(rows))
        else:
            print_table(list(table.COLUMNS.values()), [table.cells(row) for row in rows])
        print(table.FOOTNOTE)


def diagnose(
    name: Annotated[
        str, typer.Argument(metavar="PRESET", help="A transition listed by `looptim zoo`, or file.py:function.")
    ],
    json: Json = False,
    width: Width = 64,
    steps: Steps = 3,
) -> None:
    """Check whether a transition reads and writes the same map. If it does not, say how to fix it."""
    import dataclasses

    import looptim

    loop = looptim.build(name, width=width, steps=steps)
    verdict = looptim.diagnose(loop)
    if json:
        print_json({**dataclasses.asdict(verdict), "sentence": str(verdict)})
    else:
        print(looptim.describe(loop))
        print(verdict)


def recipes(json: Json = False) -> None:
    """List the recipes and studies that ship with looptim."""
    from ..recipe import shipped, summary

    kinds = {"recipes": "recipe", "studies": "study"}
    rows = [[kinds[kind], name, summary(path)] for kind in kinds for name, path in shipped(kind).items()]
    # The recipe to begin with stands first, and the paper's thirty, which need a cluster, last.
    rows.sort(key=lambda row: (row[1].startswith("paper/"), row[0] != "recipe", row[1] != "nano"))
    if json:
        print_json([dict(zip(("kind", "name", "summary"), row, strict=True)) for row in rows])
    else:
        print_table(["kind", "name", "what it is"], rows)


def config(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="Also show the values this recipe sets.", autocompletion=complete_recipe),
    ] = None,
    set: Set = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """List every recipe key with its type, default and meaning."""
    from ..recipe import keys, load_config, values_of

    if json and markdown:
        raise ValueError("--json and --markdown exclude each other; give one")
    if set and recipe is None:
        raise ValueError("--set changes a recipe; give one too, such as nano")
    given = {} if recipe is None else values_of(load_config(recipe, set=set or ()))
    rows = [key._asdict() | ({} if recipe is None else {"value": given[key.name]}) for key in keys()]
    order = ["name", *([] if recipe is None else ["value"]), "default", "type", "meaning"]
    if json:
        print_json([{name: row[name] for name in order} for row in rows])
    elif markdown:
        print(markdown_table(order, [[row[name] for name in order] for row in rows]))
    else:
        print_table(order, [[row[name] for name in order] for row in rows])
