"""How deep tokens of each kind go."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor

from ..data import Dataset, Tokenizer
from ..model import IGNORE

KINDS = {
    "whitespace": r"\s+",
    "digit": r"\s*\d+",
    "word": r"\s*[^\W\d_]+",
    "identifier": r"\s*\w+",
}
"""What a token looks like, the first that fits; all else is a sign."""


def kind_of(piece: str) -> str:
    """
    >>> [kind_of(piece) for piece in ("  ", " 12", " the", "x_1", "):")]
    ['whitespace', 'digit', 'word', 'identifier', 'sign']
    """
    return next((kind for kind, form in KINDS.items() if re.fullmatch(form, piece)), "sign")


def depth_by_kind(
    pairs: Iterable[tuple[Tensor, Tensor]], depths: Iterable[Tensor], tokenizer: Tokenizer, data: Dataset
) -> dict[str, dict[str, float]]:
    """The mean depth and the number of predicted tokens of each kind; of a task of known difficulty, by that."""
    found: dict[str, list[int]] = defaultdict(list)
    for (tokens, targets), depth in zip(pairs, depths, strict=True):
        levels = data.difficulty_of(tokens)
        pieces = {} if levels is not None else tokenizer.pieces(set(tokens.flatten().tolist()))
        rows = tokens.tolist() if levels is None else levels.tolist()
        for row, target, deep in zip(rows, targets.tolist(), depth.tolist(), strict=True):
            for each, wanted, loops in zip(row, target, deep, strict=True):
                if wanted != IGNORE:
                    found[kind_of(pieces[each]) if levels is None else f"{each} {data.unit}"].append(loops)
    return {name: {"loops": sum(all_) / len(all_), "tokens": len(all_)} for name, all_ in sorted(found.items())}
