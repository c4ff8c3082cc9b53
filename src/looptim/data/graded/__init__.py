"""Tasks whose every answer has a known difficulty: where depth should matter, and one where it should not."""

from .capo import Capo
from .dataset import GradedDataset
from .depo import Depo
from .deref import Deref
from .group import Group
from .igsm import IGSM
from .mano import Mano
from .phop import PHop
from .task import Graded, GradedTask

GRADED: dict[str, type[GradedTask]] = {task.name: task for task in (Deref, PHop, Mano, IGSM, Depo, Group, Capo)}
"""The tasks by name; `docs/data.md` shows an example of each."""

__all__ = ["GRADED", "IGSM", "Capo", "Depo", "Deref", "Graded", "GradedDataset", "GradedTask", "Group", "Mano", "PHop"]
