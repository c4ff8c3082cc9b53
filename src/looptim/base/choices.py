"""Choosing among known names, and the error for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def nearest(name: object, known: Iterable[str]) -> str:
    """The words that join a message about an unknown name to the list of known ones.

    >>> nearest("operlop", ["operloop", "vanilla"]), nearest("x", ["operloop"])
    (", did you mean 'operloop'?", ';')
    """
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ";"


def choose(what: str, value: str, known: Mapping[str, T]) -> T:
    """Return `known[value]`, or raise a ValueError that names the nearest match and lists all known names.

    >>> choose("preset", "operlop", {"operloop": 1, "vanilla": 2})
    Traceback (most recent call last):
    ValueError: unknown preset 'operlop', did you mean 'operloop'? known: operloop, vanilla
    """
    if isinstance(value, str) and value in known:
        return known[value]
    raise ValueError(f"unknown {what} {value!r}{nearest(value, known)} known: {', '.join(known)}")
