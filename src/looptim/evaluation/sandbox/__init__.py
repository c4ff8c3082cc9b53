"""Runs programs that nobody has read, and tells which pass their tests; imports nothing but the standard library.

`run` starts two confined processes for a program: one that has the program, and one that has the test and calls the
program's functions by messages of plain data (`wire`, `worker`). `confine` and `syscalls` are the confinement.
"""

from .metric import CodeEval
from .run import Limits, Outcome, check_isolation, run_program, uncontained

__all__ = ["CodeEval", "Limits", "Outcome", "check_isolation", "run_program", "uncontained"]
