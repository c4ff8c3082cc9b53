"""A small corpus of many documents, and a cache of its own for every test."""

import json
import random

import numpy as np
import pytest

from looptim.data import DataConfig, open_data

WORDS = ("loop", "state", "step", "rule", "map", "decay", "write", "read", "block", "norm", "token", "model")


def sentence(number, words=30):
    rng = random.Random(number)
    return f"document {number}: " + " ".join(rng.choice(WORDS) for _ in range(words)) + ".\n"


@pytest.fixture
def documents():
    return [sentence(number) for number in range(300)]


@pytest.fixture
def corpus(tmp_path, documents):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def open_(cache):
    def open_with(source, *, vocab_size=300, seq_len=16, **values):
        config = DataConfig(**{"source": str(source), "tokenizer": "bytes", "cache": str(cache), **values})
        return open_data(config, vocab_size=vocab_size, seq_len=seq_len, progress=False)

    return open_with


@pytest.fixture
def texts():
    def texts_of(dataset, split):
        """The documents of a split packed as bytes, read back from its tokens."""
        stream = dataset._streams[split].tokens
        *parts, rest = np.split(stream, np.flatnonzero(stream == 256) + 1)
        assert not len(rest)
        return [part[:-1].astype(np.uint8).tobytes().decode() for part in parts]

    return texts_of
