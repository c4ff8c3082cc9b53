"""Mixtures: shares that are kept, windows that come once an epoch, batches that depend on seed and step alone."""

import numpy as np
import pytest
import torch

from looptim.config import DataConfig
from looptim.data import open_data
from looptim.data.mixture import CYCLE, quotas
from looptim.recipe import load_config


@pytest.fixture
def mixed(tmp_path, corpus, cache):
    """Three kinds of sources: tokens (all 7), text, and a task; the tokens are 100 windows."""
    np.full(1700, 7, "<u2").tofile(tmp_path / "sevens.bin")
    weights = {str(tmp_path / "sevens.bin"): 5, str(corpus): 2.5, "synthetic:addition": 2.5}
    config = DataConfig(source="mixture", mixture=weights, tokenizer="bytes", cache=str(cache), valid_fraction=0.05)
    return config


def open_mixed(config):
    return open_data(config, vocab_size=257, seq_len=16, progress=False)


def test_every_source_has_its_share_and_comes_in_its_own_order(mixed, corpus, cache):
    dataset = open_mixed(mixed)
    tokens = torch.cat([dataset.batch("train", seed=1, step=step, batch_size=512).tokens for step in range(28)])
    sevens, task = (tokens == 7).all(1), (tokens == ord("=")).any(1)
    assert sevens.float().mean() == pytest.approx(0.5, abs=0.03)
    text = tokens[~sevens & ~task]
    assert len(text) / len(tokens) == pytest.approx(0.25, abs=0.03)
    # Of the text the windows come in the order in which they come where it is alone.
    alone = open_data(
        DataConfig(source=str(corpus), tokenizer="bytes", cache=str(cache), valid_fraction=0.05),
        vocab_size=257,
        seq_len=16,
        progress=False,
    )
    assert len(text) > alone.num_windows("train")
    assert torch.equal(text, torch.from_numpy(alone.windows("train", 1, np.arange(len(text)))[0]))


def test_a_cycle_has_the_shares_exactly(mixed):
    dataset = open_mixed(mixed)
    samples = np.arange(CYCLE, 2 * CYCLE, 1)
    tokens = dataset.windows("train", 3, samples)[0]
    assert (tokens == 7).all(1).sum() == CYCLE // 2
    assert quotas({"a": 1, "b": 1, "c": 1}) == [1366, 1365, 1365]


def test_a_batch_is_a_pure_function_and_processes_see_what_one_sees(mixed):
    first, again = open_mixed(mixed), open_mixed(mixed)
    for split in ("train", "valid"):
        batch = first.batch(split, seed=5, step=40, batch_size=8)
        first.batch(split, seed=5, step=41, batch_size=8)
        for a, b in zip(batch, again.batch(split, seed=5, step=40, batch_size=8), strict=True):
            assert torch.equal(a, b)
        parts = [again.batch(split, seed=5, step=40, batch_size=8, rows=slice(r, r + 4)) for r in (0, 4)]
        assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    other = first.batch("train", seed=6, step=40, batch_size=8)
    assert not torch.equal(other.tokens, first.batch("train", seed=5, step=40, batch_size=8).tokens)


def test_the_fingerprint_tells_shares_apart_but_not_places(mixed, tmp_path):
    one = open_mixed(mixed).fingerprint
    moved = tmp_path / "moved.bin"
    (tmp_path / "sevens.bin").rename(moved)
    weights = {str(moved) if name.endswith("sevens.bin") else name: w for name, w in mixed.mixture.items()}
    two = open_mixed(mixed.model_copy(update={"mixture": weights})).fingerprint
    assert one["mixture"] == two["mixture"]
    three = open_mixed(mixed.model_copy(update={"mixture": {**weights, str(moved): 1.0}})).fingerprint
    assert three["mixture"] != two["mixture"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mixture": {"nowhere.bin": 1.0, "stdlib": 1.0}}, "data source 'nowhere.bin' matches no file"),
        ({"mixture": {"stdlib": 1.0}, "tokenizer": "bpe"}, "a mixture needs an existing tokenizer"),
        ({"mixture": {"synthetic:addition": 1.0, "stdlib": 1e9}}, "'synthetic:addition' less than one of 4,096"),
        ({"mixture": {}}, "do not go together"),
        ({"mixture": {"stdlib": -1.0}}, "with a weight above 0, got -1.0"),
        ({"mixture": {"mixture": 1.0}}, "'mixture' must be another source"),
        ({"source": "stdlib", "mixture": {"stdlib": 1.0}}, "do not go together"),
    ],
)
def test_a_bad_mixture_is_one_sentence(values, message, cache):
    with pytest.raises(ValueError, match=message):
        open_mixed(DataConfig(**{"source": "mixture", "tokenizer": "bytes", "cache": str(cache), **values}))


def test_a_source_without_a_window_is_named(tmp_path, cache):
    (tmp_path / "short.txt").write_text("short")
    weights = {"synthetic:addition": 1.0, str(tmp_path / "short.txt"): 1.0}
    with pytest.raises(ValueError, match=r"split of '.*short\.txt', of data\.mixture, has no window of 16 tokens"):
        open_mixed(DataConfig(source="mixture", mixture=weights, tokenizer="bytes", cache=str(cache)))


def test_a_mixture_in_a_recipe_replaces_that_of_its_base(tmp_path):
    (tmp_path / "base.toml").write_text('[model]\nlayout = "2"\n[data]\nsource = "mixture"\nmixture = {a = 1.0, b = 2}')
    (tmp_path / "recipe.toml").write_text('base = "base.toml"\n[data.mixture]\nc = 1.0\n')
    config = load_config(tmp_path / "recipe.toml")
    assert config.data.mixture == {"c": 1.0}
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "again.toml") == config
