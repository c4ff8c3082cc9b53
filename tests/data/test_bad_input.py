"""What a user can get wrong: one sentence that says what, what was given and what to do, and nothing half written."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from looptim.data import DataConfig

GOOD = json.dumps({"text": "some text " * 40}) + "\n"

FILES = {
    "empty.txt": (b"", "holds no text, all its files are empty; give files"),
    "empty.jsonl": (b"\n\n", "holds no text"),
    "latin.txt": (("é" * 9).encode("latin-1"), r"latin\.txt is not UTF-8 at byte 0; convert it"),
    "far.txt": (b"a\n" * 700_000 + b"\xff", "is not UTF-8 at byte 1400000; convert it"),
    "cut.txt": ("日".encode()[:2], "is not UTF-8 at byte 0"),
    "latin.jsonl": (GOOD.encode() + b'{"text": "\xe9"}\n', r"latin\.jsonl, line 2 is not UTF-8"),
    "broken.jsonl": ((GOOD + GOOD + '{"text": \n').encode(), r"broken\.jsonl, line 3 is not JSON \(.*\); every line"),
    "list.jsonl": (b"[1, 2]\n", r"line 1 has no field 'text' but a list; set data\.field"),
    "other.jsonl": ((GOOD + '{"body": "x", "id": 1}\n').encode(), "line 2 has no field 'text' but the fields body, id"),
    "number.jsonl": (b'{"text": 3}\n', "line 1: field 'text' holds int, not text"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "line 1: field 'text' is not valid Unicode"),
    "broken.txt.gz": (b"\x1f\x8b\x08 nonsense", r"broken\.txt\.gz cannot be read \(.*\); repair it"),
    "broken.txt.xz": (b"nonsense", r"broken\.txt\.xz cannot be read"),
    "broken.txt.zst": (b"nonsense", r"broken\.txt\.zst cannot be read"),
    "broken.parquet": (b"nonsense", r"broken\.parquet cannot be read"),
}


def is_one_sentence(error):
    text = str(error)
    # A sentence may name two paths, and those of a test are long.
    return "\n" not in text and not text.endswith(".") and len(text) < 800


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_named_and_nothing_is_written(name, tmp_path, cache, open_):
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        open_(tmp_path / name)
    assert is_one_sentence(caught.value)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_an_empty_file_among_others_is_left_out(tmp_path, open_, texts):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "empty.txt").write_text("")
    (tmp_path / "a" / "full.txt").write_text("text " * 99)
    assert len(texts(open_(tmp_path / "a", valid_fraction=0), "train")) == 1


def test_a_parquet_without_the_column(tmp_path, open_):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"no column 'text' but body, id; set data\.field"):
        open_(tmp_path / "a.parquet")


def test_a_corpus_shorter_than_a_batch(tmp_path, open_):
    (tmp_path / "short.txt").write_text("x" * 40)
    dataset = open_(tmp_path / "short.txt", seq_len=16, valid_fraction=0)
    dataset.batch("train", seed=0, step=0, batch_size=2)
    message = (
        r"train split of '.*short\.txt' has 2 windows of 16 tokens, fewer than a batch of 4; use more text, or lower"
    )
    with pytest.raises(ValueError, match=message) as caught:
        dataset.batch("train", seed=0, step=0, batch_size=4)
    assert is_one_sentence(caught.value)
    with pytest.raises(ValueError, match=r"valid split .* has 0 windows .* raise data\.valid_fraction"):
        dataset.batch("valid", seed=0, step=0, batch_size=1)
    with pytest.raises(ValueError, match="'test' must be train or valid"):
        dataset.batch("test", seed=0, step=0, batch_size=1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("stdlb", "'stdlb' matches no file; did you mean 'stdlib', or give"),
        ("/nowhere/*.txt", r"'/nowhere/\*\.txt' matches no file; give stdlib, a path or glob"),
        ("synthetic:adition", "unknown task 'adition', did you mean 'addition'"),
        ("synthetic:zzz", "unknown task 'zzz'; known: addition, hop, chain, state"),
    ],
)
def test_an_unknown_source_is_told_the_nearest(source, message, open_):
    with pytest.raises(ValueError, match=message) as caught:
        open_(source)
    assert is_one_sentence(caught.value)


def test_a_dataset_without_the_split_or_the_field(tmp_path, open_):
    (tmp_path / "a.jsonl").write_text(GOOD)
    options = {"data_files": str(tmp_path / "a.jsonl")}
    with pytest.raises(ValueError, match=r"hf:json cannot be loaded: Unable to find .*nope\.jsonl'; check") as caught:
        open_("hf:json", options={"data_files": str(tmp_path / "nope.jsonl")})
    assert is_one_sentence(caught.value)
    with pytest.raises(ValueError, match="hf:json cannot be loaded: Bad split: held"):
        open_("hf:json", options=options, split="held")
    with pytest.raises(ValueError, match="hf:json, row 1 has no field 'body' but text"):
        open_("hf:json", options=options, field="body")
    with pytest.raises(ValueError, match="the 1 documents of 'hf:json' leave a split empty"):
        open_("hf:json", options=options)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_tokenizer_larger_than_the_vocabulary(tokenizer, corpus, open_):
    with pytest.raises(ValueError, match="257"):
        open_(corpus, tokenizer=tokenizer, vocab_size=256)
    with pytest.raises(
        ValueError, match=r"'bytes' has 257 tokens but model\.vocab_size is 200; raise it to at least 257"
    ):
        open_("synthetic:addition", vocab_size=200)


def packed(cache):
    [folder] = (cache / "packed").iterdir()
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "is truncated: .* bytes instead of"),
        (lambda data: data + b"x", "is truncated|bytes instead of"),
        (lambda data: data[:10], "is truncated: 10 bytes are no header"),
        (lambda data: b"", "is truncated: 0 bytes are no header"),
        (lambda data: b"other" + data[5:], "does not match its checksum"),
        (lambda data: data[:16] + bytes([data[16] ^ 1]) + data[17:], "does not match its checksum"),
    ],
)
def test_a_damaged_shard_is_refused_with_the_folder_to_delete(damage, message, corpus, cache, open_):
    open_(corpus)
    shard = packed(cache) / "train.bin"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        open_(corpus)
    assert f"delete the folder '{packed(cache)}'" in str(caught.value)
    assert is_one_sentence(caught.value)


def test_an_unreadable_shard_and_a_missing_meta(corpus, cache, open_):
    open_(corpus)
    shard = packed(cache) / "valid.bin"
    shard.unlink()
    with pytest.raises(ValueError, match=r"valid\.bin cannot be read \(No such file or directory\); delete the folder"):
        open_(corpus)
    # Permissions do not stop root, a folder in its place does.
    shard.mkdir()
    with pytest.raises(ValueError, match=r"valid\.bin cannot be read \(Is a directory\)"):
        open_(corpus)
    (packed(cache) / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json is missing or damaged; delete the folder"):
        open_(corpus)


def test_a_damaged_tokenizer_or_scan_is_named(corpus, cache, open_):
    open_(corpus, tokenizer="bpe")
    [tokenizer] = cache.glob("tokenizers/*/tokenizer.json")
    tokenizer.write_text("{")
    with pytest.raises(ValueError, match=r"cached tokenizer .* is damaged; delete"):
        open_(corpus, tokenizer="bpe")
    [scan] = cache.glob("scans/*.json")
    scan.write_text("{")
    with pytest.raises(ValueError, match="is damaged; delete it"):
        open_(corpus)


def test_a_cache_that_cannot_be_written(tmp_path, corpus, open_):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ValueError, match=r"'.*file/cache' cannot be written: Not a directory; free some space"
    ) as caught:
        open_(corpus, cache=str(tmp_path / "file" / "cache"))
    assert is_one_sentence(caught.value)


def test_settings_that_mean_nothing_are_errors(corpus, open_):
    with pytest.raises(ValueError, match=r"data\.options \['digits'\] are not options of source"):
        open_(corpus, options={"digits": 2})
    with pytest.raises(ValueError, match="must name files; for another split of an hf: source"):
        open_(corpus, valid_source="hf:json")
    with pytest.raises(ValueError, match="cannot go with 'synthetic:hop'"):
        open_("synthetic:hop", valid_source=str(corpus))
    with pytest.raises(ValueError, match="valid_fraction"):
        DataConfig(valid_fraction=1.0)
    with pytest.raises(ValueError, match="unknown key 'sorce', did you mean 'source'"):
        DataConfig(sorce="stdlib")
    with pytest.raises(ValueError, match="seq_len 0 must be at least 1"):
        open_(corpus, seq_len=0)


def test_a_fold_that_is_not_there(tmp_path, open_):
    with pytest.raises(
        ValueError, match=r"valid_fold \(4\) does not exist: with valid_fraction \(0.25\) there are 4 folds"
    ):
        DataConfig(valid_fraction=0.25, valid_fold=4)
    (tmp_path / "one.txt").write_text("one long document\n" * 100)
    with pytest.raises(ValueError, match="valid_fold 1 leaves a split"):
        open_(tmp_path / "one.txt", valid_fold=1)
