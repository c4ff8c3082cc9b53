"""The cache folder; whatever is in it is complete or absent, however a process ends."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..base.files import os_errors_as


def cache_folder(given: str | None) -> Path:
    """The cache folder, created if necessary: the one given, $LOOPTIM_CACHE or ~/.cache/looptim."""
    folder = Path(given or os.environ.get("LOOPTIM_CACHE") or "~/.cache/looptim").expanduser()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # A folder that cannot be written is found now, not after an hour of tokenizing. The test file never gets a
        # name.
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folder


def digest(value: Any) -> str:
    """A hash of any JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def writing(folder: Path) -> AbstractContextManager[None]:
    """Turn system errors from writing the cache into one sentence with a way out."""
    way_out = "free some space or get write access, or set data.cache or $LOOPTIM_CACHE to another folder"
    return os_errors_as(f"the cache {str(folder)!r} cannot be written", way_out)
