"""Batches: pure, complete, the same for one process and for many; and the cache they come from."""

import hashlib
import json
import multiprocessing
import os
import random
import resource
import time

import numpy as np
import pytest
import torch

from looptim.data import DataConfig, open_data
from looptim.data import packing as opening
from looptim.data.corpus import find_corpus
from looptim.data.shards import Shard, ShardWriter


def batch(dataset, split="train", *, seed=0, step=0, batch_size=8, rows=None):
    return dataset.batch(split, seed=seed, step=step, batch_size=batch_size, rows=rows)


def test_targets_are_the_next_tokens(corpus, open_):
    dataset = open_(corpus, seq_len=16)
    stream = torch.tensor(dataset._streams["train"].tokens.tolist())
    tokens, targets, documents = batch(dataset)
    assert tokens.shape == targets.shape == documents.shape == (8, 16)
    assert tokens.dtype == targets.dtype == documents.dtype == torch.int64
    windows = {tuple(stream[at : at + 17].tolist()) for at in range(0, len(stream) - 16, 16)}
    for x, y in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert x[1:] == y[:-1]
        assert (*x, y[-1]) in windows


@pytest.mark.parametrize("source", ["corpus", "synthetic:chain"])
def test_a_batch_is_a_pure_function(source, corpus, open_):
    source = corpus if source == "corpus" else source
    one, other = open_(source, seq_len=32), open_(source, seq_len=32)
    first = batch(one, step=7)
    batch(one, step=3, seed=9)
    batch(one, "valid", step=1)
    for a, b in zip(first, batch(one, step=7), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(first, batch(other, step=7), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], batch(one, step=8)[0])
    assert not torch.equal(first[0], batch(one, step=7, seed=1)[0])
    # A caller that writes into its batch does not write into the data.
    batch(one, step=7)[0].fill_(0)
    assert torch.equal(first[0], batch(one, step=7)[0])


@pytest.mark.parametrize("source", ["corpus", "synthetic:addition"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_rows_of_all_ranks_are_the_global_batch(source, world, corpus, open_):
    dataset = open_(corpus if source == "corpus" else source)
    for split in ("train", "valid"):
        for step in (0, 5, 300):
            whole = batch(dataset, split, step=step)
            parts = [
                batch(dataset, split, step=step, rows=slice(r * 8 // world, (r + 1) * 8 // world)) for r in range(world)
            ]
            for rows, every in zip(zip(*parts, strict=True), whole, strict=True):
                assert torch.equal(torch.cat(rows), every)


def test_every_window_comes_once_an_epoch_whatever_the_batch_size(corpus, open_):
    dataset = open_(corpus, seq_len=64)
    windows = dataset.num_windows("train")
    assert windows == (dataset.num_tokens("train") - 1) // 64
    size = 7
    assert windows % size
    rows = torch.cat([batch(dataset, step=step, batch_size=size)[0] for step in range(3 * windows // size + 1)])
    stream = np.asarray(dataset._streams["train"].tokens, dtype=np.int64)
    expected = sorted(stream[at * 64 : at * 64 + 64].tolist() for at in range(windows))
    epochs = [rows[epoch * windows : (epoch + 1) * windows].tolist() for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == expected
    assert epochs[0] != epochs[1] != epochs[2]


def test_validation_has_one_order(corpus, open_):
    dataset = open_(corpus, valid_fraction=0.1)
    assert torch.equal(batch(dataset, "valid", seed=0)[0], batch(dataset, "valid", seed=5)[0])
    windows = dataset.num_windows("valid")
    rows = [batch(dataset, "valid", step=step, batch_size=1)[0][0].tolist() for step in range(2 * windows)]
    assert rows[:windows] == rows[windows:]
    assert len(set(map(tuple, rows))) > 0.9 * windows


def test_train_and_validation_share_no_document(corpus, open_, texts, documents):
    # Twins of documents must follow them, or one would be trained on and the other held out.
    corpus.write_text(corpus.read_text() + "".join(json.dumps({"text": text}) + "\n" for text in documents[::-1]))
    dataset = open_(corpus, valid_fraction=0.2)
    train, valid = texts(dataset, "train"), texts(dataset, "valid")
    assert sorted(train + valid) == sorted(documents * 2)
    assert not set(train) & set(valid)
    assert 0.1 < len(valid) / len(documents * 2) < 0.3
    assert (dataset.fingerprint["train_documents"], dataset.fingerprint["valid_documents"]) == (len(train), len(valid))
    held_out = "".join(valid).encode()
    assert dataset.fingerprint["valid_bytes"] == len(held_out)
    assert dataset.fingerprint["valid_hash"] == hashlib.sha256(held_out).hexdigest()


def test_folds_hold_out_disjoint_documents(corpus, open_, texts, documents):
    folds = [open_(corpus, valid_fraction=0.25, valid_fold=fold) for fold in range(4)]
    held_out = [text for dataset in folds for text in texts(dataset, "valid")]
    assert sorted(held_out) == sorted(documents)
    assert sorted(texts(folds[1], "train") + texts(folds[1], "valid")) == sorted(documents)


def test_few_long_documents_are_split_at_their_tails(tmp_path, open_, texts):
    lines = [f"line {number} of a long text\n" for number in range(400)]
    (tmp_path / "a.txt").write_text("".join(lines))
    dataset = open_(tmp_path / "a.txt", valid_fraction=0.1)
    [train], [valid] = texts(dataset, "train"), texts(dataset, "valid")
    assert train + valid == "".join(lines)
    assert valid.startswith("line 3")
    assert 0.09 < len(valid) / len(train + valid) < 0.11
    assert dataset.fingerprint["split_by"] == "tail"


def test_boundaries_are_masked_on_demand(corpus, open_):
    plain, masked = open_(corpus, seq_len=64), open_(corpus, seq_len=64, mask_boundaries=True)
    tokens, targets, _ = batch(plain)
    hidden = batch(masked).targets
    ends = tokens == plain.tokenizer.eos
    assert ends.any()
    assert (targets != -100).all()
    assert (hidden[ends] == -100).all()
    assert torch.equal(hidden[~ends], targets[~ends])
    # The end of a document is still learned.
    assert (hidden == plain.tokenizer.eos).any()


def test_the_documents_of_a_batch_are_those_of_the_corpus(corpus, open_, documents):
    # Three documents or parts of them in most windows; the first windows of the shortest seq_len end inside of one.
    for seq_len in (16, 500):
        dataset = open_(corpus, seq_len=seq_len)
        eos, found = dataset.tokenizer.eos, []
        for tokens, ids in zip(*batch(dataset)[::2], strict=True):
            for piece in torch.tensor_split(tokens, (ids.diff().nonzero().flatten() + 1).tolist()):
                *text, last = piece.tolist()
                assert eos not in text
                found.append(dataset.tokenizer.decode([*text, last]))
                whole = [document for document in documents if found[-1] in document]
                assert whole
                # A piece that a window does not cut is one document and its end.
                assert last != eos or any(document.endswith(found[-1]) for document in whole)
        assert batch(dataset).document_lengths() and sum(batch(dataset).document_lengths()) == 8 * seq_len
        assert len(batch(dataset).document_lengths()) == len(found)
    assert set(found) & set(documents)


def test_a_batch_is_split_and_moved_as_one(corpus, open_):
    whole = batch(open_(corpus, seq_len=300))
    parts = whole.split(3)
    assert [len(part.tokens) for part in parts] == [3, 3, 2]
    for pieces, every in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(pieces), every)
    assert {part.device.type for part in whole.to(torch.device("meta"))} == {"meta"}
    assert [length for part in parts for length in part.document_lengths()] == whole.document_lengths()


def test_bpe_never_sees_what_is_held_out(corpus, open_, texts):
    config = DataConfig(source=str(corpus), valid_fraction=0.2, cache=str(corpus.parent / "cache"))
    found = find_corpus(config, cache=corpus.parent / "cache", progress=False)
    dataset = open_(corpus, valid_fraction=0.2)
    assert list(found.sample(10**9)) == texts(dataset, "train")
    assert len("".join(found.sample(3000))) < 6000


def test_bpe_is_trained_once_and_cached(corpus, cache, open_, monkeypatch):
    dataset = open_(corpus, tokenizer="bpe", vocab_size=400)
    assert dataset.tokenizer.vocab_size <= 400
    assert int(dataset._streams["train"].tokens.max()) < 400
    monkeypatch.setattr(opening.Tokenizer, "train", None)
    monkeypatch.setattr(opening, "pack", None)
    again = open_(corpus, tokenizer="bpe", vocab_size=400, seq_len=32, mask_boundaries=True)
    assert again.fingerprint == dataset.fingerprint
    assert again.tokenizer.encode("loop state") == dataset.tokenizer.encode("loop state")
    with pytest.raises(TypeError):
        open_(corpus, tokenizer="bpe", vocab_size=350)


def test_the_cache_goes_by_content_not_by_name_or_time(corpus, tmp_path, open_, monkeypatch):
    first = open_(corpus)
    os.utime(corpus, (1, 1))
    corpus.rename(tmp_path / "moved.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(opening, "pack", None)
        moved = open_(tmp_path / "moved.jsonl")
    assert moved.fingerprint["content"] == first.fingerprint["content"]
    with open(tmp_path / "moved.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    assert open_(tmp_path / "moved.jsonl").fingerprint["content"] != first.fingerprint["content"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_failure_while_packing_leaves_nothing(failure, corpus, cache, open_, monkeypatch):
    calls = []

    def fail_later(self, tokens, *, end, add=ShardWriter.add):
        calls.append(end)
        if len(calls) == 100:
            raise failure
        add(self, tokens, end=end)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", fail_later)
        expected = ValueError if isinstance(failure, OSError) else KeyboardInterrupt
        with pytest.raises(expected) as caught:
            open_(corpus)
    if expected is ValueError:
        assert "No space left on device; free some space" in str(caught.value)
    assert not list((cache / "packed").iterdir())
    assert open_(corpus).num_windows("train") > 0


def in_a_process(function):
    """Starts a function in a process of its own; a pipe carries what it returns, or the text of its ValueError."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def run():
        try:
            theirs.send(function())
        except ValueError as error:
            theirs.send(str(error))

    process = fork.Process(target=run)
    process.start()
    return process, ours


def test_a_full_disk_is_one_sentence_and_nothing_is_left(corpus, cache, open_):
    def on_a_full_disk():
        # A limit on the size of files fails in the middle of a real write.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        open_(corpus)

    process, answer = in_a_process(on_a_full_disk)
    assert "cannot be written: File too large; free some space" in answer.recv()
    process.join()
    assert not list((cache / "packed").iterdir())


def slow_writes(monkeypatch, seconds):
    def slowly(self, tokens, *, end, add=ShardWriter.add):
        add(self, tokens, end=end)
        time.sleep(seconds)

    monkeypatch.setattr(ShardWriter, "add", slowly)


def test_a_process_killed_while_packing_leaves_no_broken_cache(corpus, cache, open_, monkeypatch):
    with monkeypatch.context() as patch:
        slow_writes(patch, 10)
        process, _ = in_a_process(lambda: open_(corpus))
        while not list(cache.glob("packed/.*/train.bin")):
            assert process.is_alive()
            time.sleep(0.01)
        process.kill()
        process.join()
    assert [path.name[0] for path in (cache / "packed").iterdir()] == ["."]
    dataset = open_(corpus)
    assert dataset.num_windows("train") > 0
    # What the dead process left is swept up by the next that packs the same.
    assert [path.name[0] != "." for path in (cache / "packed").iterdir()] == [True]


def test_processes_that_race_agree(corpus, cache, open_, monkeypatch):
    slow_writes(monkeypatch, 0.001)
    started = [in_a_process(lambda: dict(open_(corpus).fingerprint)) for _ in range(3)]
    answers = [answer.recv() for _, answer in started]
    for process, _ in started:
        process.join()
    assert answers[0] == answers[1] == answers[2] == open_(corpus).fingerprint
    assert len(list((cache / "packed").iterdir())) == 1


def test_the_loser_of_a_race_uses_the_winners(corpus, open_, monkeypatch):
    pack = opening.pack

    def slow(corpus_, tokenizer, folder, progress):
        pack(corpus_, tokenizer, folder, progress)
        monkeypatch.setattr(opening, "pack", pack)
        open_(corpus)

    monkeypatch.setattr(opening, "pack", slow)
    dataset = open_(corpus)
    assert dataset.num_windows("train") > 0


def test_files_that_change_while_they_are_packed_are_refused(corpus, cache, open_, monkeypatch):
    pack = opening.pack

    def slow(*arguments):
        pack(*arguments)
        with open(corpus, "a") as file:
            file.write('{"text": "late"}\n')

    monkeypatch.setattr(opening, "pack", slow)
    with pytest.raises(ValueError, match="changed while they were read"):
        open_(corpus)
    assert not list((cache / "packed").iterdir())


def test_tokens_beyond_sixteen_bits_are_kept(tmp_path):
    writer = ShardWriter(tmp_path / "a.bin", vocab_size=100_000)
    writer.add([1, 99_999], end=True)
    writer.close()
    assert Shard(tmp_path / "a.bin").tokens.tolist() == [1, 99_999]
    small = ShardWriter(tmp_path / "b.bin", vocab_size=2**16)
    small.add([2**16 - 1], end=True)
    small.close()
    assert Shard(tmp_path / "b.bin").tokens.dtype == np.uint16


def test_a_second_opening_is_fast(cache, tmp_path):
    config = DataConfig(cache=str(cache), tokenizer="bytes")
    open_data(config, vocab_size=257, seq_len=128, progress=False)
    start = time.perf_counter()
    open_data(config, vocab_size=257, seq_len=128, progress=False)
    assert time.perf_counter() - start < 1


def test_a_flip_of_any_bit_of_a_shard_is_noticed_when_it_is_read(tmp_path):
    chance, path = random.Random(0), tmp_path / "a.bin"
    writer = ShardWriter(path, vocab_size=70_000)
    writer.add([chance.randrange(70_000) for _ in range(40_000)], end=True)
    writer.close()
    for file in (path, path.with_suffix(".sha256")):
        whole = file.read_bytes()
        for _ in range(200):
            place, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
            file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(ValueError, match=r"shard .*a\.bin is (damaged|truncated)"):
                Shard(path).read(0, 40_000)
        file.write_bytes(whole)
    shard = Shard(path)
    for _ in range(50):
        start = chance.randrange(40_000)
        stop = chance.randrange(start, 40_001)
        assert shard.read(start, stop).tolist() == shard.tokens[start:stop].tolist()
    # Each token is under the digest of its own block, the last block's included.
    for token in (0, 4095, 4096, 39_999):
        damaged = bytearray(path.read_bytes())
        damaged[64 + 4 * token] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            Shard(path).read(token, token + 1)
        damaged[64 + 4 * token] ^= 1
        path.write_bytes(damaged)


def test_a_shard_of_before_digests_gets_some(corpus, open_, cache):
    dataset = open_(corpus)
    expected = batch(dataset).tokens
    (packed,) = cache.glob("packed/*")
    digests = {path: path.read_bytes() for path in packed.glob("*.sha256")}
    assert len(digests) == 2
    for path in digests:
        path.unlink()
    assert torch.equal(batch(open_(corpus)).tokens, expected)
    assert {path: path.read_bytes() for path in packed.glob("*.sha256")} == digests
