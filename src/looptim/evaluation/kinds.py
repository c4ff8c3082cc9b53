"""How deep tokens of each kind go."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor

from ..data import Tokenizer
from ..data.deref import hops_of
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
    pairs: Iterable[tuple[Tensor, Tensor]], depths: Iterable[Tensor], tokenizer: Tokenizer, source: str
) -> dict[str, dict[str, float]]:
    """The mean depth and the number of predicted tokens of each kind; of chained assignments, by hops."""
    found: dict[str, list[int]] = defaultdict(list)
    for (tokens, targets), depth in zip(pairs, depths, strict=True):
        pieces = tokenizer.pieces(set(tokens.flatten().tolist()))
        for row, target, deep in zip(tokens.tolist(), targets.tolist(), depth.tolist(), strict=True):
            if source == "synthetic:deref":
                text = "".join(pieces[token] for token in row if token != tokenizer.eos)
                names = [f"{hops} hops" for hops in hops_of(text) for _ in range(2)]
            else:
                names = [kind_of(pieces[token]) for token in row]
            for name, wanted, loops in zip(names, target, deep, strict=False):
                if wanted != IGNORE:
                    found[name].append(loops)
    return {name: {"loops": sum(all_) / len(all_), "tokens": len(all_)} for name, all_ in sorted(found.items())}
