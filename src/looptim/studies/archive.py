"""What settled runs leave behind without their checkpoints: one file to keep, to share, to go on from elsewhere."""

from __future__ import annotations

import io
import lzma
import tempfile
import zipfile
import zlib
from pathlib import Path

from .grid import DIVERGED, answers_of, is_settled
from .spec import Cell, Plan

ARCHIVE = "runs.zip"
"""In the folder of a study."""


def pack(plan: Plan, runs: Path, archive: Path) -> bytes:
    """The content of `archive`, which need not be there, with the settled runs of a study put in."""
    packed = _read(archive)
    for cell in plan.cells:
        if is_settled(cell, runs):
            # What was packed of it before goes: it may have been trained again, to another end.
            packed = {name: data for name, data in packed.items() if not name.startswith(f"{cell.name}/")}
            there = [file for file in files_of(cell) if (runs / cell.name / file).is_file()]
            packed |= {f"{cell.name}/{file}": (runs / cell.name / file).read_bytes() for file in there}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name, data in sorted(packed.items()):
            # Without a date the same runs make the same bytes; LZMA makes a quarter less of metrics than deflate.
            zipped.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_LZMA)
    return buffer.getvalue()


def unpack(plan: Plan, archive: Path, runs: Path) -> None:
    """Put the runs of a study that `archive` has and `runs` has not there, each of them whole or not at all."""
    packed = _read(archive)
    for cell in plan.cells:
        names = {f"{cell.name}/{file}" for file in files_of(cell)} & packed.keys()
        if not names or (runs / cell.name).exists():
            continue
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=runs) as aside:
            for name in names:
                file = Path(aside, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(packed[name])
            try:
                Path(aside, cell.name).rename(runs / cell.name)
            except OSError:
                # Another study that shares the folder may have been faster.
                if not (runs / cell.name).exists():
                    raise


def files_of(cell: Cell) -> list[str]:
    """The files of a run that its study is made from, if they are there."""
    answers = answers_of(cell)
    return ["config.toml", "env.json", "metrics.jsonl", DIVERGED, *([answers] if answers else [])]


def _read(archive: Path) -> dict[str, bytes]:
    """The files in an archive by their names."""
    if not archive.is_file():
        return {}
    try:
        with zipfile.ZipFile(archive) as zipped:
            return {name: zipped.read(name) for name in zipped.namelist()}
    except (zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{archive} is damaged ({error}); get it again, or delete it, and the runs that are missing are trained"
        ) from None
