"""Page templates, which `make page` builds; a page is a template with its data packed in."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from ..loop import Loop, describe

# Before Python 3.12 a path is made of the class that the system has for it.
if TYPE_CHECKING:
    PathOfSystem = Path
else:
    PathOfSystem = type(Path())


@final
class PagePath(PathOfSystem):
    """The path of a written page; a notebook shows the page."""

    def _repr_html_(self) -> str:
        return frame(self.read_text(encoding="utf-8"), height=800)


def fill(template: str, data: Any) -> str:
    """Fill a template with data, packed such that no character of it can be mistaken for code."""
    packed = base64.b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)).decode()
    source = Path(__file__).parent / "templates" / f"{template}.html"
    return source.read_text(encoding="utf-8").replace("{{data}}", packed)


def frame(page: str, *, height: int) -> str:
    """A page embedded in another, such as a notebook."""
    style = f"width:100%;height:{height}px;border:1px solid #8884;border-radius:6px"
    return f'<iframe srcdoc="{html.escape(page)}" style="{style}" title="looptim"></iframe>'


def equation_of(loop: Loop) -> dict[str, Any]:
    """The equation of a loop's transition, as pages show it."""
    return dataclasses.asdict(describe(loop)) | {"steps": loop.steps}


def rounded(values: Tensor, digits: int = 5) -> list[Any]:
    """Nested lists of numbers, rounded to significant digits; non-finite ones are None, as JSON requires.

    >>> import torch
    >>> rounded(torch.tensor([[1.23456789, float("nan")]]))
    [[1.2346, None]]
    """
    if values.dim() > 1:
        return [rounded(row, digits) for row in values]
    return [float(f"{x:.{digits}g}") if abs(x) < float("inf") else None for x in values.tolist()]
