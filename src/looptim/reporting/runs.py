"""Several run directories, under names that tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..rundir import Run, RunDir


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`, under names that tell them apart."""
    return [RunDir(folder).read(name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parent folders as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        twice = next(str(f) for f, part in zip(folders, parts, strict=True) if parts.count(part) > 1)
        raise ValueError(f"the run {twice!r} is given twice; give each run once")
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
