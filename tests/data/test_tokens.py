"""Corpora that are tokens already: the files of llm.c, nanoGPT and Megatron, as those programs write them."""

import struct

import numpy as np
import pytest
import torch

EOS = 256


@pytest.fixture
def stream():
    """Documents of bytes, each with its end."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, size=rng.integers(1, 40)) for _ in range(400)]
    return [np.append(document, EOS) for document in documents]


def write_llm_c(path, tokens, magic=20240520, version=1, dtype="<u2"):
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens)
    path.write_bytes(head.tobytes() + tokens.astype(dtype).tobytes())


def write_megatron(path, documents, code=8, dtype="<u2"):
    """Every document is two sequences, as Megatron's sentences are."""
    halves = [part for document in documents for part in np.split(document, [len(document) // 2])]
    lengths = np.array([len(part) for part in halves], "<i4")
    starts = np.concatenate([[0], np.cumsum(lengths, dtype="<i8")[:-1]]) * np.dtype(dtype).itemsize
    firsts = np.arange(0, len(halves) + 1, 2, dtype="<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(halves), len(firsts))
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + starts.astype("<i8").tobytes() + firsts.tobytes())
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())


def write(kind, folder, documents):
    tokens = np.concatenate(documents)
    if kind == "llm.c":
        write_llm_c(folder / "a.bin", tokens[:3000])
        write_llm_c(folder / "b.bin", tokens[3000:])
    elif kind == "llm.c, wide":
        write_llm_c(folder / "a.bin", tokens, 20240801, 7, "<u4")
    elif kind == "nanoGPT":
        tokens.astype("<u2").tofile(folder / "a.bin")
    else:
        write_megatron(folder / "a.bin", documents[:100])
        write_megatron(folder / "b.bin", documents[100:], 4, "<i4")


@pytest.mark.parametrize("kind", ["llm.c", "llm.c, wide", "nanoGPT", "Megatron"])
def test_files_are_read_as_they_are(kind, tmp_path, stream, open_):
    write(kind, tmp_path, stream)
    tokens = np.concatenate(stream)
    dataset = open_(str(tmp_path / "*.bin"), valid_fraction=0.1, mask_boundaries=True)
    assert dataset.num_tokens("train") + dataset.num_tokens("valid") == len(tokens)
    assert dataset.num_tokens("valid") == round(len(tokens) / 10)
    ids = np.concatenate([np.full(len(document), number) for number, document in enumerate(stream)])
    batch = dataset.batch("train", seed=0, step=0, batch_size=dataset.num_windows("train"))
    wanted = torch.from_numpy(tokens)
    seen = set()
    for row, targets, documents in zip(*batch, strict=True):
        place = next(
            start
            for start in range(0, len(tokens) - 16, 16)
            if start not in seen and torch.equal(wanted[start : start + 16], row)
        )
        seen.add(place)
        here = torch.from_numpy(ids[place : place + 16])
        assert torch.equal(documents, here - here[0])
        after = wanted[place + 1 : place + 17]
        assert torch.equal(targets, torch.where(row == EOS, -100, after))
    assert len(seen) == dataset.num_windows("train")


def test_documents_of_megatron_need_no_end_token(tmp_path, stream, open_):
    write_megatron(tmp_path / "a.bin", [document[:-1] for document in stream if len(document) > 2])
    batch = open_(tmp_path / "a.bin", mask_boundaries=True).batch("train", seed=0, step=0, batch_size=64)
    assert not (batch.tokens == EOS).any()
    last = batch.documents.diff(dim=1) > 0
    assert last.any()
    assert (batch.targets[:, :-1][last] == -100).all()
    assert (batch.targets[:, :-1][~last] != -100).all()


def test_validation_may_have_files_of_its_own_and_content_is_what_counts(tmp_path, stream, open_):
    tokens = np.concatenate(stream).astype("<u2")
    tokens[:6000].tofile(tmp_path / "train.bin")
    tokens[6000:].tofile(tmp_path / "val.bin")
    dataset = open_(tmp_path / "train.bin", valid_source=str(tmp_path / "val.bin"))
    assert (dataset.num_tokens("train"), dataset.num_tokens("valid")) == (6000, len(tokens) - 6000)
    assert open_(tmp_path / "train.bin").fingerprint["content"] != dataset.fingerprint["content"]
    (tmp_path / "elsewhere").mkdir()
    tokens[:6000].tofile(tmp_path / "elsewhere" / "train.bin")
    moved = open_(tmp_path / "elsewhere" / "train.bin", valid_source=str(tmp_path / "val.bin"))
    assert moved.fingerprint["content"] == dataset.fingerprint["content"]


def bad(kind, folder, stream):
    path, tokens = folder / "a.bin", np.concatenate(stream)
    if kind == "beyond":
        tokens[5000] = 300
        tokens.astype("<u2").tofile(path)
    elif kind == "negative":
        write_megatron(path, [np.array([1, -1]), *stream], 4, "<i4")
    elif kind == "cut":
        write_llm_c(path, tokens)
        path.write_bytes(path.read_bytes()[:-2])
    elif kind == "odd":
        path.write_bytes(b"abc")
    elif kind == "index":
        write_megatron(path, stream)
        path.with_suffix(".idx").write_bytes(b"MMIDIDX")
    elif kind == "other index":
        write_megatron(path, stream)
        path.write_bytes(path.read_bytes()[:-4])
    elif kind == "mixed":
        (folder / "a.txt").write_text("text")
        tokens.astype("<u2").tofile(path)
    return folder if kind == "mixed" else path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("beyond", r"a\.bin has the token 300, and model\.vocab_size is 257; give the tokenizer"),
        ("negative", r"a\.bin has a negative token"),
        ("cut", r"a\.bin is truncated: \d+ tokens instead of \d+"),
        ("odd", r"a\.bin cannot be read as tokens \(its 3 bytes are no whole number"),
        ("index", r"a\.bin cannot be read as tokens \(a\.idx does not begin as an index of Megatron"),
        ("other index", r"\d+ tokens, and a\.idx tells of \d+"),
        ("mixed", r"names text and tokens"),
    ],
)
def test_a_bad_file_is_one_sentence(kind, message, tmp_path, stream, open_):
    with pytest.raises(ValueError, match=message):
        open_(bad(kind, tmp_path, stream), vocab_size=257)


def test_settings_that_tokens_cannot_have(tmp_path, stream, open_):
    np.concatenate(stream).astype("<u4").tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"is tokens already: set data\.tokenizer to what made them"):
        open_(tmp_path / "a.bin", tokenizer="bpe")
    with pytest.raises(ValueError, match="must be empty or have a dtype"):
        open_(tmp_path / "a.bin", options={"dtype": "int8"})
    (tmp_path / "val.txt").write_text("text")
    with pytest.raises(ValueError, match=r"must be tokens \(.bin\) too"):
        open_(tmp_path / "a.bin", options={"dtype": "uint32"}, valid_source=str(tmp_path / "val.txt"))
    wide = open_(tmp_path / "a.bin", options={"dtype": "uint32"})
    assert wide.num_tokens("train") + wide.num_tokens("valid") == sum(map(len, stream))
