"""Old checkpoints, whose index is a pickle; it is read with an allowlist of what it may contain."""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any, final

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .storage import DTYPES

PICKLE = ".metadata"

_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    **{
        ("torch.distributed.checkpoint.metadata", kind.__name__): kind
        for kind in (
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorProperties,
            metadata.TensorStorageMetadata,
            metadata._MEM_FORMAT_ENCODING,
        )
    },
    # The module in which the checkpoint was first written; Python 3.13 has another home for it.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{PICKLE} asks for {module}.{name}, which no checkpoint needs")
        return _ALLOWED[module, name]


@final
class PickledReader(FileSystemReader):
    """DCP's reader, except that it runs no code from the files; torch's own allowlist reads the tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / PICKLE).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"{PICKLE} is no index of tensors")
        # Anything that is not a tensor would be unpickled without an allowlist, and is not needed.
        found.state_dict_metadata = {
            name: each for name, each in found.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)
        }
        for place in found.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"{PICKLE} leads out of the checkpoint, to {place.relative_path!r}")
        return found
