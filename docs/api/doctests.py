"""For the site: the doctests in docstrings as blocks of code, which Markdown would take for quotations."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?m)^>>> .*(?:\n(?!\s*$).*)*")


class Doctests(griffe.Extension):
    """Puts fences around every doctest."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of a module, class, function or attribute that was read."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
