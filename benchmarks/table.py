"""A baseline of `looptim bench --suite --update FILE` as the table of docs/performance.md: `python table.py FILE`."""

import sys
from pathlib import Path

from looptim.hf.baseline import COLUMNS, read

known, measures = read(Path(sys.argv[1]))
print(", ".join(f"{name} {value}" for name, value in known.items()) + "\n")
for row in (COLUMNS, ["---"] * len(COLUMNS), *(measure.cells for measure in measures.values())):
    print(f"| {' | '.join(row)} |")
