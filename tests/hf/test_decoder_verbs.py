"""The verbs `generate` and `evaluate` on a looped decoder."""

import pytest
import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

import looptim as lo
from looptim.cli.models import generate as verb
from looptim.data import Tokenizer
from looptim.generation import complete
from looptim.hf.loop_model import loop_folder
from looptim.loading import open_model

pytestmark = pytest.mark.long

SIZES = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_hidden_layers": 4, "max_position_embeddings": 128, "bos_token_id": 257, "eos_token_id": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A looped Llama whose tokenizer begins every text, as Llama's does."""
    place = tmp_path_factory.mktemp("decoder")
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(initializer_range=0.2, **SIZES))
    base.save_pretrained(place / "base")
    Tokenizer.bytes().save(place / "base")
    file = place / "base" / "tokenizer.json"
    model = tokenizers.Tokenizer.from_file(str(file))
    model.add_special_tokens(["<s>"])
    model.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    model.save(str(file))
    config = place / "base" / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"bos_token": "<|endoftext|>"', '"bos_token": "<s>"'))
    return loop_folder(place / "base", place / "looped", layout="1-2x3-1", options={"shared": True})


def test_generate_says_what_transformers_says(folder, capsys):
    model, tokenizer = open_model(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)("Hello", return_tensors="pt").input_ids
    assert ids[0, 0] == 257 and tokenizer.encode("Hello") == ids[0, 1:].tolist()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 256}
    expected = tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :])
    assert lo.generate(model, tokenizer, "Hello", max_new_tokens=8, temperature=0) == expected
    verb(str(folder), "Hello", max_new_tokens=8, temperature=0.0)
    assert capsys.readouterr().out == f"Hello{expected}\n"


def test_another_depth_is_for_one_call(folder):
    model, tokenizer = open_model(folder)
    deeper = transformers.AutoModelForCausalLM.from_pretrained(folder, loops=5).eval()
    options = {"max_new_tokens": 8, "temperature": 0}
    at_five = lo.generate(deeper, tokenizer, "Hello", **options)
    assert lo.generate(model, tokenizer, "Hello", loops=5, **options) == at_five
    assert model.config.loops is None and len(model.model.layers) == 8
    assert lo.generate(deeper, tokenizer, "Hello", loops=2, **options) != at_five and deeper.config.loops == 5
    depths = []
    lo.generate(model, tokenizer, "Hello", depth=lo.depth.Exit("residual", 1e9), on_depth=depths.append, **options)
    assert depths and set(depths) == {1}
    alone = [lo.generate(model, tokenizer, prompt, **options) for prompt in ("Hello", "a")]
    assert complete(model, tokenizer, ["Hello", "a"], max_new_tokens=8, stop="\0") == alone


def test_evaluate_knows_a_decoder(folder, tmp_path):
    answer = lo.evaluate(folder, tasks=["addition"], limit=4, out=tmp_path, quiet=True)
    assert 0 <= answer["results"]["addition"]["exact_match,none"] <= 1
    lo.evaluate(folder, tasks=["addition"], limit=4, loops=5, out=tmp_path, quiet=True)
    records = [path.read_text() for path in tmp_path.glob("*.json")]
    assert len(records) == 2 and all('"preset": "operloop"' in record for record in records)
    with pytest.raises(ValueError, match="is for models of looptim's own"):
        lo.evaluate(folder, tasks=["deref"], limit=4, out=tmp_path, quiet=True)


def test_what_only_our_own_models_do_is_a_sentence(folder):
    model, tokenizer = open_model(folder)
    with pytest.raises(ValueError, match="only a model of looptim's own is drafted"):
        lo.generate(model, tokenizer, "Hello", draft_loops=1)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no loops; leave loops and depth out"):
        lo.generate(base, tokenizer, "Hello", loops=2)
