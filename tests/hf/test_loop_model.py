"""Decoders of transformers, looped: each architecture with a tiny random config."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from support import run
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.generation import ContinuousBatchingConfig

import looptim as lo
from looptim.hf.decoder import LoopedDecoderConfig
from looptim.hf.loop_model import loop_folder

pytestmark = pytest.mark.long

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8}
ARCHITECTURES = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"num_experts": 4, "mlp_only_layers": [1], **EXPERTS},
    "Gemma3": {"query_pre_attn_scalar": 8, **MIXED},
    "Mistral": {"sliding_window": 5, "head_dim": 8},
    "Phi3": {"sliding_window": 5},
    "Olmo2": {},
    "Glm4Moe": {"n_routed_experts": 4, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, **EXPERTS},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
}
PRESETS = ["vanilla", "operloop", "hyperloop", "parcae"]
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def base(name="Llama", **changes):
    """In eval mode, no weight at its initial value."""
    kind = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{kind}Config")(**SIZES | ARCHITECTURES[name] | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.05 * torch.randn_like(weight)
    return model


def tokens(batch=2, length=12):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(0))


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@every_architecture
@torch.no_grad()
def test_one_vanilla_loop_is_the_base_to_the_last_bit(name):
    model = base(name)
    before = model(tokens()).logits
    looped = lo.loop_model(model, "1-2x1-1", "vanilla")
    assert torch.equal(looped(tokens()).logits, before)
    # The base is left as it was, and the weights are its own.
    assert torch.equal(model(tokens()).logits, before) and model.config.num_hidden_layers == 4
    assert {id(p) for p in model.parameters()} == {id(p) for p in looped.parameters()}


@every_architecture
@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_cached_generation_equals_the_uncached_one(name, preset):
    """At three loops, with padding on the left, far beyond the windows of 5."""
    model = lo.loop_model(base(name), "1-2x3-1", preset)
    assert model.config.num_hidden_layers == 8
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(8))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens(), use_cache=False, **options)
    assert torch.equal(model.generate(tokens(), **options), expected)
    alone = model.generate(tokens()[:1, 5:], max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert torch.equal(alone[0], expected[0, 5:])
    if preset == "operloop":
        assert torch.equal(model.generate(tokens(), cache_implementation="static", **options), expected)


@every_architecture
def test_every_parameter_has_a_gradient_and_recomputation_changes_none(name):
    model = lo.loop_model(base(name), "1-2x3-1", "operloop").train()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    gradients = {key: weight.grad for key, weight in model.named_parameters()}
    assert [key for key, gradient in gradients.items() if gradient is None or not gradient.any()] == []
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    for key, weight in model.named_parameters():
        assert_same(weight.grad, gradients[key])


@every_architecture
@torch.no_grad()
def test_a_saved_folder_loads(name, tmp_path):
    model = lo.loop_model(base(name), "1-2x3-1", "operloop", shared=True)
    model.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(model) and not report["missing_keys"] and not report["unexpected_keys"]
    assert_same(again(tokens()).logits, model(tokens()).logits)
    # Names are those of the base, whatever the number of loops.
    names = set(again.state_dict())
    assert {key for key in names if ".loops." not in key} == set(base(name).state_dict())
    deeper = AutoModelForCausalLM.from_pretrained(tmp_path, loops=5)
    assert deeper.config.num_hidden_layers == len(deeper.model.layers) == 12
    model.set_loops(5)
    assert_same(deeper(tokens()).logits, model(tokens()).logits)
    body = AutoModel.from_pretrained(tmp_path)
    assert_same(body(tokens()).last_hidden_state, again.model(tokens()).last_hidden_state)


@every_architecture
def test_lora_merges(name):
    model = lo.loop_model(base(name), "1-2x3-1", "operloop")
    target = ["qkv_proj", "o_proj"] if name == "Phi3" else ["q_proj", "v_proj"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=target, init_lora_weights=False)).eval()
    expected = adapted(tokens()).logits
    assert not torch.equal(expected, base(name)(tokens()).logits)
    merged = adapted.merge_and_unload()
    assert_same(merged(tokens()).logits, expected)
    # Two loops of two layers: of a target, four visits, but two weights.
    assert sum(f".{target[0]}.weight" in key for key in merged.state_dict()) == 4


@torch.no_grad()
def test_layers_are_of_the_kind_their_own_number_says():
    """GLM's third layer is dense by its index, which is another once it stands behind a loop."""
    model = lo.loop_model(base("Glm4Moe"), "2x3-2", "vanilla")
    config = LoopedDecoderConfig.from_dict(model.config.to_dict())
    again = type(model)(config)
    again.load_state_dict(model.state_dict())
    assert type(again.model.layers[6].mlp).__name__ == "Glm4MoeMLP"
    assert_same(again.eval()(tokens()).logits, model(tokens()).logits)


@torch.no_grad()
def test_hidden_states_and_attentions_are_those_of_every_visit():
    model = lo.loop_model(base("Gemma3", attn_implementation="eager"), "1-2x3-1", "vanilla")
    seen = model(tokens(), output_hidden_states=True, output_attentions=True)
    assert (len(seen.hidden_states), len(seen.attentions)) == (9, 8)
    twice = [model.model.layers[i] for i in (1, 2, 1, 2, 1, 2)]
    assert not torch.equal(seen.hidden_states[1], seen.hidden_states[3]) and len({id(layer) for layer in twice}) == 2


@torch.no_grad()
def test_several_loops_and_their_depth():
    model = lo.loop_model(base(), "1x2-1-2x2", "operloop", shared=True)
    assert len(model.loops) == 2 and model.config.num_hidden_layers == 7
    deep = lo.loop_model(base(), "1x3-1-2x3", "operloop", shared=True)
    deep.load_state_dict(model.state_dict())
    at_three = deep(tokens()).logits
    model.set_loops(3)
    assert_same(model(tokens()).logits, at_three)
    model.set_depth(lo.depth.PerSequence([3, 3]))
    assert_same(model(tokens()).logits, at_three)
    model.set_loops(None)
    assert model.config.num_hidden_layers == len(model.model.layers) == 7
    with lo.trace(model) as seen:
        model(tokens())
    assert len(seen.read) == 4
    assert lo.diagnose(model.loops[0]).aligned


def test_a_loop_of_its_own_parameters_runs_no_other_number(tmp_path):
    model = lo.loop_model(base(), "1-2x3-1", "operloop")
    with pytest.raises(ValueError, match="loop-specific parameters for 3 steps and cannot run 5"):
        model.set_loops(5)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, loops=5)
    with pytest.raises(ValueError, match="loop-specific parameters for 3 steps and cannot run 5"):
        AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def test_copies_and_pickles_are_models_of_their_own():
    model = lo.loop_model(base(), "1-2x3-1", "operloop")
    expected = model(tokens()).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(tokens()).logits, expected)
        twin.model.layers.get_submodule("1").mlp.up_proj.weight.zero_()
        assert not torch.equal(twin(tokens()).logits, expected)
        assert torch.equal(model(tokens()).logits, expected)


@torch.no_grad()
def test_continuous_batching_is_generate():
    model = lo.loop_model(base("Qwen3"), "1-2x3-1", "operloop")
    prompts = [tokens()[0, :7].tolist(), tokens()[1].tolist()]
    settings = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch(
        inputs=prompts,
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(block_size=16, num_blocks=16, max_batch_tokens=64),
    )
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert answer.generated_tokens == alone[0, len(prompt) :].tolist()


@torch.no_grad()
def test_a_compiled_forward_is_the_eager_one():
    model = lo.loop_model(base(), "1-2x3-1", "operloop")
    expected = model(tokens(), use_cache=False).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(compiled(tokens(), use_cache=False).logits, expected)


def test_trainer_trains_it(tmp_path):
    model = lo.loop_model(base(), "1-2x2-1", "operloop")
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    settings = TrainingArguments(
        tmp_path, max_steps=4, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    before = model(tokens(), labels=tokens()).loss.item()
    Trainer(model, settings, train_dataset=rows).train()
    assert model.eval()(tokens(), labels=tokens()).loss.item() < before


def tied():
    model = base()
    model.model.layers[2].mlp = model.model.layers[0].mlp
    return model


@pytest.mark.parametrize(
    ("make", "layout", "options", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "1-2x2-1", {}, "takes a model of transformers, got Linear"),
        (lambda: base().model, "1-2x2-1", {}, "LlamaModel has no head; load it with AutoModelForCausalLM"),
        (lambda: lo.loop_model(base(), "4x2"), "1-2x2-1", {}, "is looped already; loop the model it came from"),
        (base, "1-2x2-2", {}, "has 5 layers, but LlamaForCausalLM has 4; the numbers must add up"),
        (base, "4", {}, "loops nothing; loop some layers"),
        (base, "1-2x2-1", {"preset": "operlop"}, "did you mean 'operloop'"),
        (base, "1-2x2-1", {"stream": 3}, "operloop has no option 'stream'"),
        (base, "1-2x2-1", {"preset": "full_bandwidth", "token_shift": True}, "reads the state of the token before"),
        (tied, "1-2x2-1", {}, "layers 2 and 0 of LlamaForCausalLM are tied, and the loop over 1 to 2 would cut them"),
    ],
)
def test_what_cannot_be_looped_is_refused_in_a_sentence(make, layout, options, message):
    with pytest.raises(ValueError, match=message) as error:
        lo.loop_model(make(), layout, **options)
    assert "\n" not in str(error.value)


class Peeking(lo.Projection):
    """Reads the input of the next token, too."""

    def forward(self, ctx):
        return lo.maps.Identity(), F.pad(ctx.e[:, 1:], (0, 0, 0, 1))


class Uphill(lo.Objective):
    def value(self, o, t):
        return 0.5 * (o - t).square().sum(-1)

    def grad(self, o, t):
        return t - o


@pytest.mark.parametrize(
    ("projection", "objective", "message"),
    [
        (Peeking, lo.objectives.InnerProduct, "cheat sees later tokens: the bias of the projection Peeking"),
        (lo.projections.Plain, Uphill, "`grad` of Uphill is not the derivative .* has the wrong sign"),
    ],
)
def test_a_transition_that_cheats_is_refused(monkeypatch, projection, objective, message):
    def cheat(width, steps):
        descent = lo.rules.GradientDescent(lo.controls.ConstantStep(), lo.controls.ConstantDecay())
        return lo.Loop(lo.Transition(projection(), objective(), descent), width=width, steps=steps, name="cheat")

    monkeypatch.setitem(lo.PRESETS, "cheat", cheat)
    model = base()
    with pytest.raises(ValueError, match=message):
        lo.loop_model(model, "1-2x2-1", "cheat")
    assert model.config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}, "has an encoder and a"),
        ("MambaForCausalLM", {"hidden_size": 16, "state_size": 4}, "has recurrent layers"),
        ("FalconForCausalLM", {"hidden_size": 16, "num_attention_heads": 2}, "FalconDecoderLayer does not return its"),
    ],
)
def test_other_architectures_are_refused_in_a_sentence(kind, sizes, message):
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(vocab_size=64, num_hidden_layers=4, **sizes))
    with pytest.raises(ValueError, match=message) as error:
        lo.loop_model(model, "1-2x2-1")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{"streams": "many"}, {"streams": 0}, {"streams": True}, {"shared": "yes"}])
def test_options_of_the_wrong_kind_are_refused_before_a_start_is_made_of_them(options):
    with pytest.raises(ValueError, match=r"must be (a whole number of at least 1|true or false), got"):
        lo.loop_model(base(), "1-2x2-1", **options)


def test_what_is_wrong_is_said_before_the_weights_are_read(tmp_path, monkeypatch):
    base().save_pretrained(tmp_path / "base")
    monkeypatch.setattr("looptim.hf.loop_model.open_folder", lambda folder: pytest.fail("the weights were read"))
    for given, message in [
        ({"layout": "1-2x2-2"}, "has 5 layers, but LlamaForCausalLM has 4"),
        ({"layout": "1-2x2-1", "preset": "operlop"}, "did you mean 'operloop'"),
        ({"layout": "1-2x2-1", "options": {"stream": 1}}, "operloop has no option 'stream'"),
    ]:
        with pytest.raises(ValueError, match=message):
            loop_folder(tmp_path / "base", tmp_path / "out", **given)


def test_the_command_line_loops_a_folder(tmp_path):
    base().save_pretrained(tmp_path / "base")
    out = tmp_path / "looped"
    options = ["--set", "streams=2", "--set", "shared=true"]
    done = run("loop", str(tmp_path / "base"), "--layout", "1-2x3-1", "--out", str(out), *options)
    assert (done.returncode, done.stdout.strip()) == (0, str(out)), done.stderr
    config = AutoConfig.from_pretrained(out)
    assert config.loop["options"] | {"streams": 2, "shared": True} == config.loop["options"]
    with pytest.raises(ValueError, match="exists; give a new folder"):
        loop_folder(tmp_path / "base", out, layout="1-2x3-1")
    with pytest.raises(ValueError, match="has 5 layers, but LlamaForCausalLM has 4"):
        loop_folder(tmp_path / "base", tmp_path / "other", layout="1-2x3-2")
    assert not (tmp_path / "other").exists()
