"""The paper's benchmarks on a run or an exported folder, its averages, and its tables."""

from .averages import averages
from .run import evaluate
from .sandbox import Limits, run_program
from .suites import ROWS, SUITES, Row
from .tables import Column, read_columns, tables, tables_of, write_tables

__all__ = [
    "ROWS",
    "SUITES",
    "Column",
    "Limits",
    "Row",
    "averages",
    "evaluate",
    "read_columns",
    "run_program",
    "tables",
    "tables_of",
    "write_tables",
]
