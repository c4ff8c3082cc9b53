"""Which code a preset is made of: a result belongs to it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from pathlib import Path

from ..base.choices import choose
from .registry import PRESETS


def code_of(name: str) -> str | None:
    """A hash of the source that a user's preset is defined in, comments and layout aside; None for a shipped preset.

    Of a module it is the whole file, without the calls and conditions at its top level, since parts lean on what stands
    around them; of a notebook or a console, the function itself.

    >>> code_of("operloop") is None
    True
    """
    preset = inspect.unwrap(choose("preset", name, PRESETS))
    home = getattr(preset, "__module__", None) or ""
    if home.partition(".")[0] == __name__.partition(".")[0]:
        return None
    file = getattr(sys.modules.get(home), "__file__", None)
    try:
        text = Path(file).read_text(encoding="utf-8") if file else inspect.getsource(preset)
        tree = ast.parse(inspect.cleandoc(text) if file is None else text)
    except (OSError, TypeError, SyntaxError):
        # Without a source there is still what Python made of it.
        code = getattr(preset, "__code__", None)
        content = repr((code.co_code, code.co_consts, code.co_names)) if code else repr(preset)
        return hashlib.sha256(content.encode()).hexdigest()[:16]
    tree.body = [part for part in tree.body if not isinstance(part, ast.Expr | ast.If)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
