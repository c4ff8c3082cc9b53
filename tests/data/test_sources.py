"""Where documents come from: kinds of files, compression, globs, the standard library, datasets."""

import gzip
import json
import lzma
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from looptim.data import DataConfig, files, open_data, sources
from looptim.data.sources import find_valid_source


def jsonl(texts):
    return "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in texts).encode()


def parquet(texts):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "other": [1] * len(texts)}), sink)
    return sink.getvalue().to_pybytes()


def zstd(data):
    # Two frames: what tools that compress in parallel write.
    codec, half = pyarrow.Codec("zstd"), len(data) // 2
    return codec.compress(data[:half], asbytes=True) + codec.compress(data[half:], asbytes=True)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst"])
def test_every_kind_of_file_compressed_or_not_gives_the_same_documents(kind, ending, tmp_path, open_, texts, documents):
    data = {"txt": "".join(documents).encode(), "jsonl": jsonl(documents), "parquet": parquet(documents)}[kind]
    data = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}[ending](data)
    (tmp_path / f"corpus.{kind}{ending}").write_bytes(data)
    dataset = open_(tmp_path / f"corpus.{kind}{ending}", valid_fraction=0.1)
    read = {split: texts(dataset, split) for split in ("train", "valid")}
    if kind == "txt":
        assert "".join(read["train"] + read["valid"]) == "".join(documents)
    else:
        assert sorted(read["train"] + read["valid"]) == sorted(documents)
        assert [text for text in documents if text in set(read["train"])] == read["train"]


def test_a_long_text_is_read_in_pieces_that_end_with_a_line(tmp_path, monkeypatch, open_, texts):
    monkeypatch.setattr(files, "PIECE", 64)
    text = "\ufeff" + "".join(f"line {n} é日本🎉\n" for n in range(100)) + "x" * 300 + "\nno end"
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    document = next(files.read_documents(tmp_path / "long.txt", field="text"))
    pieces = list(document.pieces())
    assert "".join(pieces) == text[1:]
    assert document.length == len(text) - 1
    assert len(pieces) > 20
    assert all(piece.endswith("\n") for piece in pieces[:-1] if "x" not in piece)
    dataset = open_(tmp_path / "long.txt", valid_fraction=0)
    assert texts(dataset, "train") == [text[1:]]


def test_a_glob_a_folder_and_a_path(tmp_path, open_, texts):
    for name in ("b.md", "a.txt", "inner/c.py", ".hidden"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name * 9)

    def read(source):
        return [text[:4] for text in texts(open_(source, valid_fraction=0), "train")]

    assert read(tmp_path / "in") == ["a.tx", "b.md", "inne"]
    assert read(tmp_path / "in" / "*.??") == ["b.md"]
    assert read(tmp_path / "in" / "**" / "*.*") == ["a.tx", "b.md", "inne"]
    assert read(tmp_path / "in" / "a.txt") == ["a.tx"]


def test_another_field(tmp_path, open_, texts):
    (tmp_path / "a.jsonl").write_text('{"body": "one", "text": 3}\n\n{"body": ""}\n{"body": null}\n{"body": "two"}\n')
    assert texts(open_(tmp_path / "a.jsonl", field="body", valid_fraction=0), "train") == ["one", "two"]


def test_validation_files_of_their_own(tmp_path, open_, texts):
    (tmp_path / "train.txt").write_text("train " * 50)
    (tmp_path / "valid.txt").write_text("valid " * 50)
    dataset = open_(tmp_path / "train.txt", valid_source=str(tmp_path / "valid.txt"))
    assert texts(dataset, "train") == ["train " * 50]
    assert texts(dataset, "valid") == ["valid " * 50]
    assert dataset.fingerprint["split_by"] == "source"


def test_the_standard_library_is_there_split_by_file_without_its_tests(open_, texts):
    dataset = open_("stdlib")
    train, valid = set(texts(dataset, "train")), set(texts(dataset, "valid"))
    assert dataset.fingerprint["split_by"] == "document"
    assert not train & valid
    assert len(train | valid) > 500
    assert 0.005 < len(valid) / len(train) < 0.05
    assert any("class ArgumentParser" in text for text in train | valid)
    assert not any("import test.support" in text and "unittest.main()" in text for text in train | valid)
    assert len(dataset.fingerprint["content"]) == 64


def test_a_dataset_by_name_is_streamed(tmp_path, cache, texts, documents):
    (tmp_path / "d.jsonl").write_bytes(jsonl(documents))
    options = {"data_files": str(tmp_path / "d.jsonl")}

    def open_hf(**more):
        config = DataConfig(
            source="hf:json",
            tokenizer=more.pop("tokenizer", "bytes"),
            cache=str(cache),
            valid_fraction=0.1,
            options=options | more,
        )
        return open_data(config, vocab_size=300, seq_len=16, progress=False)

    dataset = open_hf()
    train, valid = texts(dataset, "train"), texts(dataset, "valid")
    assert sorted(train + valid) == sorted(documents)
    assert 10 < len(valid) < 60
    assert len(texts(open_hf(max_documents=100), "train")) < 100
    assert open_hf(tokenizer="bpe").tokenizer.vocab_size == 300

    # A file that changed is packed again, one that did not is not.
    assert open_hf().fingerprint == dataset.fingerprint
    (tmp_path / "d.jsonl").write_bytes(jsonl([*documents, "one more"]))
    assert open_hf().fingerprint["content"] != dataset.fingerprint["content"]

    both = {"data_files": {"train": options["data_files"], "held": str(tmp_path / "v.jsonl")}, "valid_split": "held"}
    (tmp_path / "v.jsonl").write_bytes(jsonl(["held out"]))
    assert texts(open_hf(**both), "valid") == ["held out"]
    config = DataConfig(source="hf:json", options=both, valid_source="v.txt")
    with pytest.raises(ValueError, match=r"'v\.txt' and data\.options\.valid_split 'held' both name what is held out"):
        find_valid_source(config)


def test_a_source_of_ones_own_is_an_entry_of_the_table(monkeypatch, cache, texts, documents):
    def open_memory(config, split):
        some = documents[::2] if split == "train" else documents[1::2]
        rows = [files.row_document(text, field="text", chats=False, where=split) for text in some]
        return sources.Source(config.source, split, lambda part, parts: iter(rows), scannable=True)

    monkeypatch.setitem(sources.SCHEMES, "memory", open_memory)
    config = DataConfig(source="memory:words", tokenizer="bytes", cache=str(cache), options={"valid_split": "held"})
    dataset = open_data(config, vocab_size=300, seq_len=16, progress=False)
    assert [texts(dataset, split) for split in ("train", "valid")] == [documents[::2], documents[1::2]]
    with pytest.raises(ValueError, match=r"matches no file; did you mean 'memory:', or give .*memory:NAME or"):
        sources.find_source(DataConfig(source="memry:"))


@pytest.mark.long
def test_optional_packages_are_not_imported_for_plain_text(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 99)
    code = (
        "import sys; from looptim.data import *;"
        f"config = DataConfig(source={str(tmp_path / 'a.txt')!r}, cache={str(tmp_path / 'cache')!r});"
        "open_data(config, vocab_size=300, seq_len=8);"
        "sys.exit(any(name in sys.modules for name in ('datasets', 'pyarrow', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
