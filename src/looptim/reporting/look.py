"""The look page: what one model, or two side by side, does with a text, as one file that needs nothing else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, final

from torch import nn

from ..base.files import os_errors_as, write_whole
from ..data import Tokenizer
from ..loading import open_model
from ..loop import Depth, Loop
from ..model import LoopedLM
from .recording import record
from .template import equation_of, fill, frame


@final
@dataclasses.dataclass(frozen=True)
class Look:
    """A page; in a notebook it shows itself."""

    html: str = dataclasses.field(repr=False)
    path: Path | None = None

    def _repr_html_(self) -> str:
        return frame(self.html, height=900)


def look(
    model: str | Path | nn.Module,
    text: str,
    *,
    out: str | Path | None = None,
    against: str | Path | nn.Module | None = None,
    tokenizer: Tokenizer | None = None,
    loops: int | None = None,
    depth: Depth | None = None,
) -> Look:
    """What a model says after each loop, and what its optimizer does meanwhile; written to `out` if that is given.

    `model` is a run, an exported folder, a folder of `looptim loop`, or a looped model, which then needs a `tokenizer`;
    `against` is another one to stand beside it. `loops` runs a shared transition another number of times than its
    layout says. `depth`, an `Exit`, also runs the model with it and shows where each token left.
    """
    subjects = [_subject(given, tokenizer) for given in (model, against) if given is not None]
    # Half a surrogate, as the command line makes of a stray byte, is no text that a tokenizer takes.
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    encoded = [words.encode_prompt(text, foreign=not isinstance(part, LoopedLM)) for _, part, words in subjects]
    if encoded[0] != encoded[-1]:
        first, second = (name for name, _, _ in subjects)
        raise ValueError(
            f"{first} and {second} have different tokenizers; look at two models that share one, or at each"
        )
    ids, words = encoded[0], subjects[0][2]
    models = [{**_head(name, part), **record(part, ids, loops=loops, depth=depth)} for name, part, _ in subjects]
    shown = {id for each in models for row in each["lens"]["top"] for column in row for id in column}
    shown |= {id for each in models if each["left"] for id in each["left"]["says"]}
    page = fill("look", {"tokens": ids, "pieces": words.pieces(shown | set(ids)), "models": models})
    if out is None:
        return Look(page)
    with os_errors_as(f"cannot write the page to {out}", "choose another file with --out"):
        write_whole(Path(out), page)
    return Look(page, Path(out))


def _subject(given: str | Path | nn.Module, tokenizer: Tokenizer | None) -> tuple[str, nn.Module, Tokenizer]:
    if not isinstance(given, nn.Module):
        return (str(given), *open_model(given))
    if tokenizer is None:
        raise ValueError("a model in memory needs a tokenizer; give one with tokenizer=, or the folder of a run")
    # A wrapper of transformers around our model shares its weights; the model itself shows its experts and attention.
    return type(given).__name__, getattr(given, "looped", given), tokenizer


def _head(name: str, model: nn.Module) -> dict[str, Any]:
    """What stands above a model's numbers: its name, and the equation of its transition."""
    loops = [module for module in model.modules() if isinstance(module, Loop)]
    return {"name": name, "equations": [equation_of(loop) for loop in loops]}
