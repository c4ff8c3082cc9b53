"""What finished runs leave behind without their checkpoints: a single file to keep, share, and continue from."""

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
"""The archive's name in the folder of a study."""
LARGEST = 1 << 30
"""The size limit of an unpacked archive, in bytes; one that ships with looptim has a few million."""
LEFT_OUT = {"lr", "moe_load", "moe_load_max", "tokens_per_s", "mfu"}
"""Metrics that are left out: two thirds of the bytes, which no table or figure of a study needs."""


# The name of a run's folder and of a file in it or in its evaluations, in characters that every system accepts.
NAMES = r"[\w=+,@-][\w.=+,@-]*/(eval/)?[\w=+,@-][\w.=+,@-]*"


def pack(plan: Plan, runs: Path, archive: Path) -> bytes:
    """The content of `archive`, which need not exist, with the finished runs of a study added."""
    packed = _read(archive)
    for cell in plan.cells:
        if is_settled(cell, runs):
            # Older files of a run are dropped, since it may have been trained again since they were packed.
            packed = {name: data for name, data in packed.items() if not name.startswith(f"{cell.name}/")}
            there = [file for file in files_of(cell, runs) if file.is_file()]
            packed |= {file.relative_to(runs).as_posix(): _content(file) for file in there}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name, data in sorted(packed.items()):
            # Without dates, equal runs give equal bytes; LZMA packs metrics a quarter smaller than deflate.
            zipped.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_LZMA)
    return buffer.getvalue()


def unpack(plan: Plan, archive: Path, runs: Path) -> None:
    """Restore runs of a study that `archive` has and `runs` lacks, each completely or not at all."""
    packed = _read(archive)
    for cell in plan.cells:
        files = [file for file in files_of(cell, runs) if file.relative_to(runs).as_posix() in packed]
        if not files or (runs / cell.name).exists():
            continue
        # Another study that shares the folder may be faster; what it puts there is the same.
        with whole_folder(runs / cell.name) as aside:
            for file in files:
                write_whole(aside / file.relative_to(runs / cell.name), packed[file.relative_to(runs).as_posix()])


def files_of(cell: Cell, runs: Path) -> list[Path]:
    """The files of a run that its study is made from, if they are there."""
    run, asked = RunDir(runs / cell.name), (answers_of(cell, runs), exits_of(cell, runs))
    files = [run.config_file, run.environment_file, run.metrics.path, run.samples.path, run.diverged_file]
    return [*files, *(file for file in asked if file is not None)]


def _content(file: Path) -> bytes:
    """A file as it is packed; metrics without what is left out."""
    if file.suffix != ".jsonl":
        return file.read_bytes()
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    kept = [{key: value for key, value in line.items() if key not in LEFT_OUT} for line in lines]
    return "".join(json.dumps(line) + "\n" for line in kept).encode()


def _read(archive: Path) -> dict[str, bytes]:
    """The files in an archive, by name."""
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
            f"{archive} is damaged ({error}); get it again, or delete it to train the missing runs"
        ) from None
