"""Processes that pack together make the files that one makes alone, and say once what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import config, run_training

from looptim.data import DataConfig, open_data
from looptim.data.sources import cut_evenly

PACK = """
import json, sys
from looptim.data import DataConfig, open_data
from looptim.training import distributed
world = distributed.start()
for values in json.load(open(sys.argv[1])):
    data = open_data(DataConfig(**values), vocab_size=400, seq_len=16, progress=False, crew=world)
    assert data.num_windows("train") > 0
"""


def sources(folder, corpus):
    """Text in five files of which one is empty, with the ways to hold out; a dataset of many files; tokens."""
    lines = corpus.read_text().splitlines(keepends=True)
    for number, (start, stop) in enumerate([(0, 10), (10, 200), (200, 201), (201, 201), (201, 300)]):
        (folder / f"part{number}.jsonl").write_text("".join(lines[start:stop]))
    (folder / "held.txt").write_text("held out\n" * 40)
    (folder / "long.txt").write_text("".join(f"line {n}\n" for n in range(500)))
    rng = np.random.default_rng(0)
    rng.integers(0, 256, 5000).astype("<u2").tofile(folder / "a.bin")
    rng.integers(0, 256, 3000).astype("<u2").tofile(folder / "b.bin")
    many = {"source": str(folder / "part*.jsonl"), "valid_fraction": 0.2}
    files = [str(folder / f"part{n}.jsonl") for n in (0, 1, 2, 4)]
    return [
        {**many, "tokenizer": "bytes"},
        {**many, "tokenizer": "bpe"},
        {**many, "tokenizer": "bytes", "valid_source": str(folder / "held.txt")},
        {"source": str(folder / "long.txt"), "tokenizer": "bytes"},
        {"source": "hf:json", "tokenizer": "bytes", "options": {"data_files": files}, "valid_fraction": 0.2},
        {"source": str(folder / "*.bin"), "tokenizer": "bytes"},
    ]


def made(cache):
    """All files of a cache, but for what a key is made of where files lie."""
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


@pytest.mark.long
def test_three_processes_make_the_files_of_one(tmp_path, corpus):
    given = sources(tmp_path, corpus)
    for values in given:
        alone = DataConfig(**values, cache=str(tmp_path / "alone"))
        open_data(alone, vocab_size=400, seq_len=16, progress=False)
    (tmp_path / "pack.py").write_text(PACK)
    (tmp_path / "sources.json").write_text(json.dumps([{**v, "cache": str(tmp_path / "three")} for v in given]))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command = [sys.executable, *launch, str(tmp_path / "pack.py"), str(tmp_path / "sources.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    expected, found = made(tmp_path / "alone"), made(tmp_path / "three")
    assert expected.keys() == found.keys()
    assert len([name for name in expected if name.endswith("train.bin")]) == 5
    assert expected == found


def test_parts_are_neighbors_and_all_there_is():
    rng = np.random.default_rng(1)
    for _ in range(200):
        sizes = rng.integers(0, 9, size=rng.integers(1, 12)).tolist()
        parts = int(rng.integers(1, 6))
        items = list(range(len(sizes)))
        cut = [cut_evenly(items, sizes, part, parts) for part in range(parts)]
        assert [item for part in cut for item in part] == items
        heaviest = max(sum(sizes[item] for item in part) for part in cut)
        assert heaviest <= sum(sizes) / parts + max(sizes)


@pytest.mark.long
def test_what_is_wrong_with_the_data_is_said_once(tmp_path):
    np.array([*range(257)] * 40 + [999], "<u2").tofile(tmp_path / "a.bin")
    values = {"source": str(tmp_path / "a.bin"), "tokenizer": "bytes", "options": {}, "cache": str(tmp_path / "cache")}
    (tmp_path / "recipe.toml").write_text(config(data=values).to_toml())
    missing = ["--set", "data.source=mixture", "--set", 'data.mixture={"gone.bin"=1.0, "stdlib"=2.0}']
    sentences = {"a.bin has the token 999, and model.vocab_size is 257": [], "'gone.bin' matches no file": missing}
    for sentence, changes in sentences.items():
        done = run_training(2, tmp_path / "recipe.toml", tmp_path / "run", *changes)
        assert done.returncode != 0
        assert done.stderr.count(sentence) == 1, done.stderr
        assert not Path(tmp_path / "run").exists()
