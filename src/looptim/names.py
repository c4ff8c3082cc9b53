"""What to say of a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, known: Iterable[str]) -> str:
    """What joins a message about an unknown name to the known ones.

    >>> nearest("operlop", ["operloop", "vanilla"]), nearest("x", ["operloop"])
    (", did you mean 'operloop'?", ';')
    """
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ";"
