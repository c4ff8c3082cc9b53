"""The paper's benchmarks on a run or an exported folder, its averages, and its tables."""

from .averages import averages
from .run import evaluate
from .sandbox import Limits, run_program
from .suites import ROWS, SUITES, Row

__all__ = [
    "ROWS",
    "SUITES",
    "Limits",
    "Row",
    "averages",
    "evaluate",
    "run_program",
]
