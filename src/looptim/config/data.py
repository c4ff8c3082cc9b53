"""Where the tokens come from."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from .strict import Strict


class DataConfig(Strict):
    """Where the tokens come from and how they are cut; `docs/data.md` has the forms of `source`."""

    source: str = Field("stdlib", description="stdlib, a path or glob, hf:NAME, synthetic:NAME, or mixture.")
    mixture: dict[str, float] = Field({}, description="For source = mixture: the other sources and their weights.")
    field: str = Field("text", description="The field that holds the text in jsonl, parquet and hf: rows.")
    template: str | None = Field(
        None, description="Set for rows that are conversations: tokenizer (its own chat template), plain, or a path."
    )
    split: str = Field("train", description="The split of an hf: dataset.")
    name: str | None = Field(None, description="The configuration of an hf: dataset.")
    tokenizer: str = Field("bpe", description="bpe, bytes, the path of a tokenizer.json, or hf:NAME.")
    valid_fraction: float = Field(
        0.02, ge=0, lt=1, description="The share of documents held out for validation, chosen by hash."
    )
    valid_fold: int = Field(0, ge=0, description="Which documents are held out; every fold holds out different ones.")
    valid_source: str | None = Field(None, description="Files to validate on; then all of `source` is trained on.")
    mask_boundaries: bool = Field(False, description="Whether to ignore targets that lie across a document boundary.")
    mask_attention: bool = Field(False, description="Whether attention and positions start anew at every document.")
    cache: str | None = Field(
        None, description="Where packed data is cached. Default: $LOOPTIM_CACHE or ~/.cache/looptim."
    )
    options: dict[str, Any] = Field({}, description="Options of a synthetic task or an hf: dataset.")

    @model_validator(mode="after")
    def _fold_exists(self) -> DataConfig:
        if self.valid_fold and (self.valid_fold + 1) * self.valid_fraction > 1:
            raise ValueError(
                f"valid_fold ({self.valid_fold}) does not exist: with valid_fraction ({self.valid_fraction}) "
                f"there are {int(1 / self.valid_fraction)} folds, numbered from 0"
            )
        return self
