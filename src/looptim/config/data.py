"""Where the tokens come from."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from .strict import Strict


class DataConfig(Strict):
    """Where the tokens come from and how they are cut; `docs/data.md` has the forms of `source`."""

    source: str = Field("stdlib", description="stdlib, a path or glob, hf:NAME, synthetic:NAME, or mixture.")
    mixture: dict[str, float] = Field({}, description="Of the source mixture: other sources, with their weights.")
    field: str = Field("text", description="The field of jsonl, parquet and hf: rows that holds the text.")
    split: str = Field("train", description="The split of an hf: dataset.")
    name: str | None = Field(None, description="The configuration of an hf: dataset.")
    tokenizer: str = Field("bpe", description="bpe, bytes, a path of a tokenizer.json or hf:NAME.")
    valid_fraction: float = Field(0.02, ge=0, lt=1, description="The share of documents held out, by their hash.")
    valid_fold: int = Field(0, ge=0, description="Which share: another fold holds out other documents.")
    valid_source: str | None = Field(None, description="Held-out files; all of `source` is then trained on.")
    mask_boundaries: bool = Field(False, description="Whether targets across a document boundary become -100.")
    mask_attention: bool = Field(
        False, description="Whether attention stays inside a document and positions begin with it."
    )
    cache: str | None = Field(None, description="A folder; by default $LOOPTIM_CACHE or ~/.cache/looptim.")
    options: dict[str, Any] = Field({}, description="Knobs of a synthetic task, or arguments of an hf: dataset.")

    @model_validator(mode="after")
    def _fold_exists(self) -> DataConfig:
        if self.valid_fold and (self.valid_fold + 1) * self.valid_fraction > 1:
            raise ValueError(
                f"valid_fold ({self.valid_fold}) does not exist: shares of valid_fraction ({self.valid_fraction}) "
                f"number {int(1 / self.valid_fraction)}, from 0"
            )
        return self
