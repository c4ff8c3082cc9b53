import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from looptim.data import EOS, Tokenizer

BYTES = Tokenizer.bytes()
TEXTS = ["def f(x):\n    return x + 1\n", "Ünïcode, 日本語 🎉", " two  spaces . and , stops", "", "\r\n\t\x00"]


@given(st.text())
def test_bytes_round_trip_any_text_and_the_fast_way_is_the_models(text):
    ids = BYTES.encode(text)
    assert ids == list(text.encode())
    assert ids == BYTES._model.encode(text).ids
    assert BYTES.decode(ids) == text


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer.train(["the loop reads the state and the loop writes the state. " * 20], vocab_size=280)


def test_bpe_fills_its_vocabulary_and_round_trips(bpe):
    assert 257 < bpe.vocab_size <= 280
    assert len(bpe.encode("the loop")) < len("the loop")
    for text in TEXTS:
        assert bpe.decode(bpe.encode(text)) == text
        assert list(bpe.encode_many([text])[0]) == bpe.encode(text)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_spelling_of_a_special_token_is_text(kind, bpe):
    tokenizer = {"bytes": BYTES, "bpe": bpe}[kind]
    ids = tokenizer.encode(f"a{EOS}b")
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == f"a{EOS}b"
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eos]) == "a"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_transformers_loads_it_and_agrees(kind, bpe, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = {"bytes": BYTES, "bpe": bpe}[kind]
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text).input_ids == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.eos_token_id, len(theirs)) == (tokenizer.eos, tokenizer.vocab_size)
    assert theirs(["a", "abc"], padding=True).input_ids[0].count(theirs.pad_token_id) == 2


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_saving_and_loading_change_nothing(kind, bpe, tmp_path):
    tokenizer = {"bytes": BYTES, "bpe": bpe}[kind]
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.hash, loaded.eos, loaded.vocab_size) == (tokenizer.hash, tokenizer.eos, tokenizer.vocab_size)
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_a_foreign_tokenizer_keeps_its_end_or_gets_one(tmp_path):
    words = tokenizers.models.WordLevel({"[UNK]": 0, "loop": 1, "state": 2, "</s>": 3, "fin": 4}, unk_token="[UNK]")
    foreign = tokenizers.Tokenizer(words)
    foreign.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    # What a model wants around its input, and cut to size, has no place in a packed stream.
    foreign.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
    foreign.enable_truncation(1)
    foreign.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path / "tokenizer.json").eos == 3
    assert Tokenizer.load(tmp_path).encode("loop state loop") == [1, 2, 1]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "fin"}}))
    assert Tokenizer.load(tmp_path).eos == 4

    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "loop": 1}, unk_token="[UNK]"))
    (tmp_path / "bare").mkdir()
    bare.save(str(tmp_path / "bare" / "tokenizer.json"))
    assert (Tokenizer.load(tmp_path / "bare").eos, Tokenizer.load(tmp_path / "bare").vocab_size) == (2, 3)


def test_bad_tokenizers_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match=r"'.*nope\.json' cannot be read \(No such file or directory\); give bpe"):
        Tokenizer.load(tmp_path / "nope.json")
    with pytest.raises(ValueError, match="vocab_size 256 is too small"):
        Tokenizer.train(["text"], vocab_size=256)
