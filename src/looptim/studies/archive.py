"""What settled runs leave behind without their checkpoints: one file to keep, to share, to go on from elsewhere."""

from __future__ import annotations

import io
import json
import lzma
import re
import zipfile
import zlib
from pathlib import Path

from ..base.files import whole_folder, write_whole
from ..rundir import RunDir
from .grid import answers_of, exits_of, is_settled
from .spec import Cell, Plan

ARCHIVE = "runs.zip"
"""In the folder of a study."""
LARGEST = 1 << 30
"""Bytes that an archive may have unpacked; one that shipped with looptim has a few million."""
LEFT_OUT = {"lr", "moe_load", "moe_load_max", "tokens_per_s", "mfu"}
"""Of the metrics: two thirds of them, of which neither a table nor a figure of a study is made."""


# A run's folder, and a file in it or in its folder of evaluations, by names that every system takes as they are.
NAMES = r"[\w=+,@-][\w.=+,@-]*/(eval/)?[\w=+,@-][\w.=+,@-]*"


def pack(plan: Plan, runs: Path, archive: Path) -> bytes:
    """The content of `archive`, which need not be there, with the settled runs of a study put in."""
    packed = _read(archive)
    for cell in plan.cells:
        if is_settled(cell, runs):
            # Older files of the run go: it may have been trained again since they were packed.
            packed = {name: data for name, data in packed.items() if not name.startswith(f"{cell.name}/")}
            there = [file for file in files_of(cell, runs) if file.is_file()]
            packed |= {file.relative_to(runs).as_posix(): _content(file) for file in there}
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
        files = [file for file in files_of(cell, runs) if file.relative_to(runs).as_posix() in packed]
        if not files or (runs / cell.name).exists():
            continue
        # Another study that shares the folder may be faster, and what it puts there is the same.
        with whole_folder(runs / cell.name) as aside:
            for file in files:
                write_whole(aside / file.relative_to(runs / cell.name), packed[file.relative_to(runs).as_posix()])


def files_of(cell: Cell, runs: Path) -> list[Path]:
    """The files of a run that its study is made from, if they are there."""
    run, asked = RunDir(runs / cell.name), (answers_of(cell, runs), exits_of(cell, runs))
    files = [run.config_file, run.environment_file, run.metrics.path, run.samples.path, run.diverged_file]
    return [*files, *(file for file in asked if file is not None)]


def _content(file: Path) -> bytes:
    """A file as it is packed: metrics without what is left out."""
    if file.suffix != ".jsonl":
        return file.read_bytes()
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    kept = [{key: value for key, value in line.items() if key not in LEFT_OUT} for line in lines]
    return "".join(json.dumps(line) + "\n" for line in kept).encode()


def _read(archive: Path) -> dict[str, bytes]:
    """The files in an archive by their names."""
    if not archive.is_file():
        return {}
    try:
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if not re.fullmatch(NAMES, info.filename):
                    raise ValueError(f"it has {info.filename[:80]!r}, which is no file of a run")
            size = sum(info.file_size for info in zipped.infolist())
            if size > LARGEST:
                raise ValueError(f"it would take {size} bytes")
            return {name: zipped.read(name) for name in zipped.namelist()}
    except (zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"{archive} is damaged ({error}); get it again, or delete it, and the runs that are missing are trained"
        ) from None
