"""Folders that anybody may have made: nothing of them is executed, and nothing is fetched."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import looptim as lo
from looptim.hf import LoopedForCausalLM, open_folder
from looptim.model import LoopedLM

pytestmark = pytest.mark.long

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MODELS = {
    "looped": lambda: lo.loop_model(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4, **SIZES)), "1-2x2-1", "operloop"
    ),
    "ours": lambda: LoopedForCausalLM.from_looped(LoopedLM(lo.ModelConfig.tiny(layout="1-2x2-1"), seed=0)),
}


def add(folder, **keys):
    """Other keys in the config.json of a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_code_of_the_hub_that_a_config_names_is_not_fetched(name, key, tmp_path):
    MODELS[name]().save_pretrained(tmp_path)
    add(tmp_path, **{key: "somebody/kernel"})
    with pytest.raises(ValueError, match=rf"names code of the hub \({key}: 'somebody/kernel'\); remove {key} from it"):
        open_folder(tmp_path)
    # What is loaded without us asking first does not look at it.
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    assert AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").config._attn_implementation


@pytest.mark.parametrize("name", MODELS)
def test_code_in_the_folder_is_not_run(name, tmp_path):
    MODELS[name]().save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')\nclass Model: pass\nclass Config: pass\n")
    add(tmp_path, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert type(open_folder(tmp_path)) is type(MODELS[name]())


def test_other_folders_are_refused_in_a_sentence(tmp_path):
    MODELS["looped"]().save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/base"}')
    MODELS["looped"]().save_pretrained(tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no tensors")
    vision = transformers.ViTConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    vision.save_pretrained(tmp_path / "vision")
    for name, message in {
        "nowhere": "has no config.json, so it is not a model",
        "adapter": "has an adapter beside its model; merge it",
        "damaged": "does not load in transformers",
        "vision": "has a vit, which is no causal language model",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            open_folder(tmp_path / name)
        assert "\n" not in str(error.value)


@torch.no_grad()
def test_a_folder_opens_as_it_was_saved(tmp_path):
    model = MODELS["looped"]().eval()
    model.save_pretrained(tmp_path)
    tokens = torch.arange(12)[None]
    assert torch.equal(open_folder(tmp_path)(tokens).logits, model(tokens).logits)
