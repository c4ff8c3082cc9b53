"""The tensors of a checkpoint as pure data: safetensors files, a JSON index of them, and their digests.

DCP plans who writes and who reads which part of a tensor, for however many processes; here are the bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast, final

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from xxhash import xxh3_128

INDEX = "index.json"
DIGESTS = "XXH128SUMS"
"""One line for each file, as `xxh128sum -c XXH128SUMS` reads it: XXH3 of 128 bits, which takes less time than reading.

It tells damage, not forgery: who changes a file on purpose can change its digest too.
"""
OLD_DIGESTS = "SHA256SUMS"
"""The same with SHA-256, of checkpoints of before, whose loading it made three times as slow."""

# The dtype names of safetensors.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Storage:
    """Methods that DCP asks of every storage but that have nothing to do here."""

    def __init__(self, folder: Path):
        self.folder = folder

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


@final
class TensorWriter(_Storage, StorageWriter):
    """Writes a process's tensors, a file for each first part of their names: `model-00000.safetensors`.

    The first process adds the index, the small files that are given as text, and the digests of all.
    """

    def __init__(self, folder: Path, texts: Mapping[str, str]):
        super().__init__(folder)
        self.texts = texts

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=process) for process, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = []
        # Tensors with the largest alignment come first, so that all tensors of a file are aligned.
        items = sorted(plan.items, key=lambda item: -_parts(item)[1].itemsize)
        for part in sorted({item.index.fqn.partition(".")[0] for item in items}):
            file = f"{part}-{plan.storage_data:05}.safetensors"
            ours = [item for item in items if item.index.fqn.partition(".")[0] == part]
            tensors = (cast(Tensor, planner.resolve_data(item)) for item in ours)
            digest = write_tensors(self.folder / file, [_parts(item) for item in ours], tensors)
            written += [WriteResult(item.index, 0, (file, digest)) for item in ours]
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        placed = {result.index: result.storage_data for result in chain(*results)}
        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{name} is no tensor"
            chunks = [
                {"file": placed[MetadataIndex(name, c.offsets)][0], "offsets": [*c.offsets], "shape": [*c.sizes]}
                for c in tensor.chunks
            ]
            index[name] = {"dtype": DTYPE_NAMES[tensor.properties.dtype], "shape": [*tensor.size], "chunks": chunks}
        digests = dict(placed.values())
        for file, text in {INDEX: json.dumps(index), **self.texts}.items():
            (self.folder / file).write_text(text, encoding="utf-8")
            digests[file] = xxh3_128(text.encode()).hexdigest()
        lines = (f"{digest}  {file}\n" for file, digest in sorted(digests.items()))
        (self.folder / DIGESTS).write_text("".join(lines), encoding="utf-8")


@final
class TensorReader(_Storage, StorageReader):
    """Reads what any number of processes wrote with `TensorWriter`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index, known = json.loads((self.folder / INDEX).read_text()), read_digests(self.folder)
        tensors, places = {}, {}
        for name, tensor in index.items():
            shape, chunks = torch.Size(tensor["shape"]), []
            for chunk in tensor["chunks"]:
                if chunk["file"] not in known:
                    raise ValueError(f"{find_digests(self.folder).name} has no {chunk['file']!r}")
                chunks.append(ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["shape"])))
                key = chunk_name(name, chunk["offsets"], chunk["shape"], shape)
                places[MetadataIndex(name, chunks[-1].offsets)] = chunk["file"], key
            tensors[name] = TensorStorageMetadata(TensorProperties(DTYPES[tensor["dtype"]]), shape, chunks)
        return Metadata(tensors, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.places = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            file, key = self.places[item.storage_index]
            by_file.setdefault(file, []).append((key, item))
        for file, items in by_file.items():
            with safe_open(self.folder / file, framework="pt") as stored:
                for key, item in items:
                    spans = zip(item.storage_offsets, item.lengths, strict=True)
                    wanted = stored.get_tensor(key)[tuple(slice(at, at + length) for at, length in spans)]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(wanted)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _parts(item: WriteItem) -> tuple[str, torch.dtype, torch.Size]:
    """The name, dtype and shape of what is to be written."""
    assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
    data = item.tensor_data
    name = chunk_name(item.index.fqn, data.chunk.offsets, data.chunk.sizes, data.size)
    return name, data.properties.dtype, data.chunk.sizes


def chunk_name(name: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """The name of a tensor's part in its file: the tensor's own, plus the slice if it is not the whole tensor.

    >>> chunk_name("head.weight", [4, 0], [4, 8], [8, 8])
    'head.weight[4:8,0:8]'
    """
    if tuple(sizes) == tuple(shape):
        return name
    return f"{name}[{','.join(f'{at}:{at + size}' for at, size in zip(offsets, sizes, strict=True))}]"


def write_tensors(path: Path, parts: Sequence[tuple[str, torch.dtype, torch.Size]], tensors: Iterable[Tensor]) -> str:
    """Write and sync a safetensors file, tensor by tensor; returns its digest."""
    header, end = {}, 0
    for name, dtype, shape in parts:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": [*shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pieces = (tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data for tensor in tensors)
    digest = xxh3_128()
    with path.open("wb") as file:
        for piece in chain([len(text).to_bytes(8, "little") + text], pieces):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def find_digests(folder: Path) -> Path:
    """The file of a checkpoint that holds the digests of the others."""
    old = folder / OLD_DIGESTS
    return old if old.is_file() else folder / DIGESTS


def read_digests(folder: Path) -> dict[str, str]:
    """The digest that each file of a checkpoint was written with."""
    file = find_digests(folder)
    *lines, rest = file.read_bytes().decode().split("\n")
    found = [re.fullmatch(r"([0-9a-f]{32}|[0-9a-f]{64})  ([\w.-]+)", line) for line in lines]
    if rest or not all(found):
        raise ValueError(f"{file.name} is not as it was written")
    return {match[2]: match[1] for match in found if match}


def check_digests(folder: Path, names: Iterable[str]) -> None:
    """Raise a ValueError for the first of these files that has changed since it was written."""
    known = read_digests(folder)
    kind = hashlib.sha256 if find_digests(folder).name == OLD_DIGESTS else xxh3_128
    for name in names:
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, kind).hexdigest() != known[name]:
                raise ValueError(f"{name} is not as it was written: its digest has changed")
