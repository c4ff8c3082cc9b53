"""Where the tokens come from."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from looptim.config import Strict


class DataConfig(Strict):
    """Where the tokens come from and how they are cut; `docs/data.md` has the forms of `source`."""

    source: str = Field("stdlib", description="stdlib, a path or glob, hf:NAME or synthetic:NAME.")
    field: str = Field("text", description="The field of jsonl, parquet and hf: rows that holds the text.")
    split: str = Field("train", description="The split of an hf: dataset.")
    name: str | None = Field(None, description="The configuration of an hf: dataset.")
    tokenizer: str = Field("bpe", description="bpe, bytes, a path of a tokenizer.json or hf:NAME.")
    valid_fraction: float = Field(0.02, ge=0, lt=1, description="The share of documents held out, by their hash.")
    valid_source: str | None = Field(None, description="Held-out files; all of `source` is then trained on.")
    mask_boundaries: bool = Field(False, description="Whether targets across a document boundary become -100.")
    cache: str | None = Field(None, description="A folder; by default $LOOPTIM_CACHE or ~/.cache/looptim.")
    options: dict[str, Any] = Field({}, description="Knobs of a synthetic task, or arguments of an hf: dataset.")
