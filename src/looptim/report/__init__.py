"""Pictures and a page of one or several runs.

`report` reads `metrics.jsonl` and `config.toml` of each run and writes figures and a self-contained `index.html`.
"""

from .figures import Picture, draw
from .page import report
from .runs import Run, read_run
from .style import colour_of, style_of, styles_of

__all__ = ["Picture", "Run", "colour_of", "draw", "read_run", "report", "style_of", "styles_of"]
