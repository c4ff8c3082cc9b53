"""The transformers adapter: configs, weights, training. What concerns the cache is in test_hf_generation.py."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hf_models import SHARED, looped, tiny_config, tokens, wrapped
from support import config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import looptim as lo
from looptim.config import ModelConfig
from looptim.hf import LoopedConfig, LoopedForCausalLM, LoopedModel
from looptim.hf.slots import eager_attention
from looptim.loop.depth import Fixed
from looptim.model.lm import LoopedLM


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_config_goes_there_and_back():
    config = tiny_config(
        loop=SHARED, tied=True, balance="per_visit", router="per_visit", balance_rate=0.25, aux_coefficient=0.5
    )
    there = LoopedConfig.from_model_config(config, eos_token_id=3)
    assert there.to_model_config() == config
    again = LoopedConfig.from_dict(json.loads(there.to_json_string()))
    assert again.to_model_config() == config
    assert (again.hidden_size, again.eos_token_id, again.tie_word_embeddings) == (32, 3, True)


def test_a_config_has_the_words_of_transformers_and_none_of_generate():
    config = LoopedConfig.from_model_config(tiny_config())
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
        assert isinstance(getattr(config, name), int)
    assert config._get_generation_parameters() == {}
    assert LoopedForCausalLM(config).generation_config.top_k != config.num_experts_per_tok


def test_what_is_derived_ignores_what_was_stored():
    stored = LoopedConfig.from_model_config(tiny_config(loop=SHARED)).to_dict()
    assert stored["num_hidden_layers"] == len(stored["layer_types"]) == 8
    config = LoopedConfig.from_dict(stored | {"num_hidden_layers": 99, "layer_types": ["nonsense"]}, loops=5)
    assert config.num_hidden_layers == 1 + 2 * 5 + 1
    assert config.layer_types == ["sliding_attention", "full_attention"] * 6


def test_an_attribute_with_a_word_of_ours_is_saved_and_loaded(tmp_path):
    model = wrapped()
    # Transformers sets some of them on any config.
    model.config.norm_eps, model.config.window = 1.0, 3
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.config.norm_eps, again.config.window) == (1.0, 3)
    assert again.config.to_model_config() == tiny_config()
    assert_same(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "4-4x-2"}, "does not parse at '4x'"),
        ({"num_experts_per_tok": 9}, "top_k .9. must not exceed"),
        ({"num_attention_heads": 3}, "heads .3. must be a multiple of kv_heads"),
        ({"loop": {"preset": "operlop"}}, "did you mean 'operloop'"),
        ({"width": 64}, "width goes by hidden_size"),
        (
            {"loop": {"preset": "vanilla", "options": {"steps": 5}}},
            "steps is not an option of a loop; it is set by model",
        ),
    ],
)
def test_a_bad_config_is_one_sentence(change, message):
    values = LoopedConfig.from_model_config(tiny_config()).to_dict() | change
    with pytest.raises(ValueError, match=message) as error:
        LoopedForCausalLM(LoopedConfig(**values))
    assert "\n" not in str(error.value)


def test_logits_are_those_of_the_looped_model_in_fp32():
    model = wrapped()
    output = model(tokens())
    assert_same(output.logits, model.looped(tokens()))
    assert model.bfloat16()(tokens()).logits.dtype == torch.float32


def test_inputs_by_embedding_and_outputs_in_part():
    model = wrapped()
    expected = model(tokens()).logits
    assert_same(model(inputs_embeds=model.get_input_embeddings()(tokens())).logits, expected)
    assert_same(model(tokens(), logits_to_keep=3).logits, expected[:, -3:])
    assert_same(model(tokens(), logits_to_keep=torch.tensor([0, 5])).logits, expected[:, [0, 5]])
    assert isinstance(model(tokens(), return_dict=False), tuple)


def test_hidden_states_are_the_embedding_and_every_unrolled_layer():
    model = wrapped()
    seen = []
    model.looped.hidden(model.looped.embed(tokens()), observe=seen.append)
    states = model(tokens(), output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1 == 9
    assert_same(states[0], model.looped.embed(tokens()))
    for state, expected in zip(states[1:-1], seen[:-1], strict=True):
        assert_same(state, expected)
    assert_same(model.looped.head(states[-1]), model(tokens()).logits)


def test_attentions_are_causal_and_keep_to_the_window():
    model = wrapped()
    model.set_attn_implementation("eager")
    attentions = model(tokens(), output_attentions=True).attentions
    distance = torch.arange(20).unsqueeze(1) - torch.arange(20)
    for weights, kind in zip(attentions, model.config.layer_types, strict=True):
        visible = (distance >= 0) & (distance < (5 if kind == "sliding_attention" else 20))
        assert torch.equal(weights > 0, visible.expand_as(weights))


def test_packed_sequences_do_not_see_each_other():
    model = wrapped()
    first, second = tokens(1, 9), tokens(1, 11, seed=1)
    positions = torch.cat([torch.arange(9), torch.arange(11)]).unsqueeze(0)
    for options in ({"use_cache": False}, {"labels": torch.cat([first, second], dim=1)}):
        # In training, without a word about the cache, there is none.
        model.train("labels" in options)
        packed = model(torch.cat([first, second], dim=1), position_ids=positions, **options).logits
        assert_same(packed[:, :9], model.looped(first))
        assert_same(packed[:, 9:], model.looped(second))


@pytest.mark.parametrize("preset", ["vanilla", "operloop", "hyperloop"])
def test_packed_sequences_are_the_documents_of_a_looped_model(preset):
    model = wrapped(preset)
    lengths = [[9, 1, 10], [3, 3, 14]]
    ids = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in lengths])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    packed = model(tokens(2, 20), position_ids=positions, use_cache=False).logits
    looped = model.looped
    hidden = looped.hidden(looped.embed(tokens(2, 20)), documents=ids).h
    assert_same(packed, looped.head(hidden))


def test_attention_is_told_the_positions_by_which_flash_sees_packed_sequences():
    seen = []

    def recording(module, query, key, value, attention_mask, scaling, **kwargs):
        seen.append(kwargs.get("position_ids"))
        return eager_attention(module, query, key, value, attention_mask, scaling)

    ALL_ATTENTION_FUNCTIONS.register("recording", recording)
    model, positions = wrapped(), torch.tensor([[0, 1, 2, 0, 1]])
    model.config._attn_implementation = "recording"
    model(tokens(1, 5), position_ids=positions, use_cache=False)
    assert len(seen) == 8 and all(torch.equal(given, positions) for given in seen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.full((1, 4), 64)}, "token 64 is out of range: the vocabulary has 64"),
        ({"input_ids": torch.full((1, 4), -1)}, "token -1 is out of range"),
        ({"input_ids": torch.zeros(1, 65, dtype=torch.long)}, "65 tokens, but max_position_embeddings is 64"),
        ({}, "either input_ids or inputs_embeds"),
    ],
)
def test_bad_input_is_an_error_in_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        wrapped()(**arguments)


@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_that_of_the_looped_model(training):
    model = wrapped().train(training)
    expected = model.looped.loss(tokens()[:, :-1], tokens()[:, 1:])
    labels = torch.nn.functional.pad(tokens()[:, :-1], (0, 1), value=0)
    output = model(tokens()[:, :-1], labels=labels[:, :-1])
    # transformers shifts the labels itself, so one position fewer counts.
    shorter = model.looped.loss(tokens()[:, :-1], torch.nn.functional.pad(tokens()[:, 1:-1], (0, 1), value=-100))
    assert_same(output.loss, shorter.loss if training else shorter.cross_entropy)
    assert output.aux_loss > 0 and expected.loss > expected.cross_entropy


@pytest.mark.parametrize("preset", ["operloop", "parcae"])
def test_gradient_checkpointing_gives_the_same_gradients(preset):
    # Parcae starts from noise in training: with the same seed, from the same.
    model = wrapped(preset).train()

    def gradients():
        torch.manual_seed(0)
        model.zero_grad()
        output = model(tokens(), labels=tokens())
        output.loss.backward()
        return [output.aux_loss, *[p.grad for p in model.parameters()]]

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing and model.looped.checkpointing
    for got, expected in zip(gradients(), plain, strict=True):
        assert_same(got, expected)
    assert len(model(tokens(), output_hidden_states=True).hidden_states) == 9
    with pytest.raises(ValueError, match="gradient checkpointing runs layers twice"):
        model(tokens(), past_key_values=wrapped(preset)(tokens()).past_key_values)
    model.gradient_checkpointing_disable()
    assert not model.looped.checkpointing


@pytest.mark.long
def test_trainer_lowers_the_loss(tmp_path):
    model = wrapped().train()
    data = [{"input_ids": row, "labels": row} for row in tokens(4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    shapes = []
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=lambda seen: {"tokens": shapes.append(seen.predictions.shape) or seen.label_ids.size},
    )
    trainer.train()
    assert trainer.evaluate()["eval_tokens"] == tokens(4).numel()
    assert shapes == [(*tokens(4).shape, model.config.vocab_size)]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.long
def test_lora_trains_attention_and_experts(tmp_path):
    peft = pytest.importorskip("peft")
    model = wrapped()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = model(tokens()).logits
    config = peft.LoraConfig(
        r=2,
        target_modules=["q", "k", "v", "o"],
        target_parameters=["experts.gate", "experts.up", "experts.down"],
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    adapted.gradient_checkpointing_enable()
    adapted.train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(12):
        loss = adapted(input_ids=tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert any(".experts." in name for name in trained) and any(".attention.q." in name for name in trained)
    after = adapted.eval()(input_ids=tokens()).logits
    adapted.save_pretrained(tmp_path)
    fresh = wrapped()
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, base[name])
    assert_same(fresh(tokens()).logits, before)
    assert_same(peft.PeftModel.from_pretrained(fresh, tmp_path).eval()(input_ids=tokens()).logits, after)
    fresh = wrapped()
    fresh.load_adapter(str(tmp_path))
    assert_same(fresh(tokens()).logits, after)


@pytest.mark.parametrize("preset", ["operloop", "parcae", "none"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_loads_with_the_auto_classes(preset, tied, tmp_path):
    model = wrapped(preset, tied=tied)
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_looptim.py",
    }
    assert AutoConfig.from_pretrained(tmp_path).to_model_config() == model.looped.config
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, LoopedForCausalLM) and not again.training
    assert again.state_dict().keys() == model.state_dict().keys()
    # The router biases and the start of the noise among them.
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert (again.looped.head.weight is again.looped.embedding.weight) == tied
    assert_same(again.looped(tokens()), model.looped(tokens()))
    hidden = AutoModel.from_pretrained(tmp_path)
    assert type(hidden) is LoopedModel
    assert_same(hidden(tokens()).last_hidden_state, model(tokens(), output_hidden_states=True).hidden_states[-1])


def test_a_folder_in_shards_and_in_bf16_loads(tmp_path):
    model = wrapped()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(LoopedForCausalLM.from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits)
    half = LoopedForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.looped.blocks[1].attention.q.weight.dtype == torch.bfloat16
    # Their steps of 5e-3 would be lost in bf16.
    assert half.looped.blocks[1].feedforward.bias.dtype == torch.float32
    assert half(tokens()).logits.isfinite().all()


def test_loading_with_more_loops_runs_the_same_weights_longer(tmp_path):
    model = wrapped(loop=SHARED, balance="per_visit", router="per_visit")
    model.save_pretrained(tmp_path)
    for loops in (1, 2, 6):
        longer = AutoModelForCausalLM.from_pretrained(tmp_path, loops=loops)
        assert longer.config.num_hidden_layers == len(longer.model.slots) == 2 + 2 * loops
        assert_same(longer(tokens()).logits, model.looped(tokens(), depth=Fixed(loops)))
        longer.save_pretrained(tmp_path / str(loops))
        assert LoopedForCausalLM.from_pretrained(tmp_path / str(loops)).config.loops == loops


def test_a_live_model_changes_its_loops():
    model = wrapped(loop=SHARED)
    for loops in (5, 1, None):
        model.set_loops(loops)
        assert_same(model(tokens()).logits, model.looped(tokens(), depth=loops and Fixed(loops)))
        assert [slot.layer_idx for slot in model.model.slots] == list(range(model.config.num_hidden_layers))


def test_loops_that_cannot_be_changed_are_refused(tmp_path):
    model = wrapped()
    model.save_pretrained(tmp_path)
    message = "operloop has loop-specific parameters for 3 steps and cannot run 2"
    with pytest.raises(ValueError, match=message):
        model.set_loops(2)
    assert model.config.loops is None and len(model.model.slots) == 8
    model.config.loops = 2
    with pytest.raises(ValueError, match=r"config.loops was changed to 2; call set_loops\(2\)"):
        model(tokens())
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, loops=2)
    with pytest.raises(ValueError, match="layout '4' has no looped segment"):
        wrapped("none").set_loops(2)
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        wrapped(loop=SHARED).set_loops(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "1-3x3-1"}, "missing .such as model.blocks.4"),
        ({"layout": "1-1x3-1"}, "unknown .such as model.blocks.3"),
        ({"num_experts": 8}, "of another shape .such as model.blocks.1.feedforward.bias"),
        ({"loop": {"preset": "hyperloop"}}, "missing .such as model.loops.0.*unknown .such as model.loops.0"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_sentence(change, message, tmp_path):
    wrapped().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"do not fit the config: .*{message}") as error:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_what_a_checkpoint_lacks_is_initialized_as_the_parts_are_built():
    config = LoopedConfig.from_model_config(tiny_config("parcae"))
    model = LoopedForCausalLM.from_pretrained(None, config=config, state_dict={})
    fresh = LoopedLM(config.to_model_config(), seed=0)
    for (name, got), expected in zip(model.looped.state_dict().items(), fresh.state_dict().values(), strict=True):
        if name.endswith(("gain", "bias", "fixed", "A_log", "dt_bias", ".B")):
            assert torch.equal(got, expected), name
        else:
            torch.testing.assert_close(got.std(), expected.std(), rtol=0.4, atol=0, msg=name)


def test_a_new_model_is_a_new_looped_model():
    config = LoopedConfig.from_model_config(tiny_config("hyperloop"))
    torch.manual_seed(3)
    expected = LoopedLM(config.to_model_config()).state_dict()
    torch.manual_seed(3)
    for name, tensor in LoopedForCausalLM(config).looped.state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_can_be_resized(tied, tmp_path):
    model = wrapped(tied=tied)
    before = model(tokens()).logits
    model.resize_token_embeddings(80)
    assert (model.looped.head.weight is model.looped.embedding.weight) == tied
    assert_same(model(tokens()).logits[..., :64], before)
    assert model(torch.full((1, 4), 79)).logits.shape[-1] == 80
    model.save_pretrained(tmp_path)
    assert_same(LoopedForCausalLM.from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits)


def test_a_wrapper_shares_the_weights_of_what_it_wraps():
    model = looped()
    wrapper = LoopedForCausalLM.from_looped(model, eos_token_id=3)
    assert wrapper.looped is model and wrapper.generation_config.eos_token_id == 3
    assert not wrapper.training and LoopedForCausalLM.from_looped(model.train()).training


LOAD = "from transformers import AutoModelForCausalLM as A; m = A.from_pretrained({path!r}, trust_remote_code=True); "
WITHOUT_LOOPTIM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "looptim":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
"""


def python(code, tmp_path):
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.long
def test_a_program_that_never_heard_of_looptim_loads_the_folder(tmp_path):
    folder = tmp_path / "model"
    wrapped().save_pretrained(folder)
    load = LOAD.format(path=str(folder))
    # Saved once more, the folder must not collect copies of our source.
    done = python(load + f"m.save_pretrained({str(tmp_path / 'again')!r}); print(type(m).__module__)", tmp_path)
    assert done.stdout.strip() == "looptim.hf.model", done.stderr
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "again").iterdir()}


@pytest.mark.long
def test_where_looptim_is_not_installed_the_error_says_what_to_do(tmp_path):
    wrapped().save_pretrained(tmp_path)
    done = python(WITHOUT_LOOPTIM + LOAD.format(path=str(tmp_path)), tmp_path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr.splitlines()[-2] + done.stderr.splitlines()[-1]
    assert "install it from its repository, with its extra hf" in done.stderr


@pytest.mark.slow
def test_lm_eval_and_the_pipeline_read_the_folder(tmp_path):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(63)} | {"<end>": 63}, unk_token="<end>"))
    words.pre_tokenizer = Whitespace()
    model = wrapped()
    model.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>").save_pretrained(tmp_path)
    scorer = huggingface.HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", batch_size=2)
    pairs = [("w1 w2 w3", " w4 w5"), ("w7", " w8")]
    scores = scorer.loglikelihood([instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    long, short = (model.looped(torch.tensor([ids])).log_softmax(-1)[0] for ids in ([1, 2, 3, 4, 5], [7, 8]))
    assert_same(torch.tensor([score for score, _ in scores]), torch.stack([long[2, 4] + long[3, 5], short[0, 8]]))
    generated = pipeline("text-generation", model=str(tmp_path))("w1 w2", max_new_tokens=4, do_sample=False)
    expected = model.generate(
        torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False, eos_token_id=63, pad_token_id=63
    )
    ids = words.encode(generated[0]["generated_text"].replace("w2w", "w2 w")).ids
    assert ids == [i for i in expected[0].tolist() if i != 63]


def test_the_paper_model_can_be_described_without_allocating():
    config = ModelConfig(layout="4-4x3-2", loop={"preset": "operloop"})
    with torch.device("meta"):
        model = LoopedForCausalLM(LoopedConfig.from_model_config(config))
    assert model.config.num_hidden_layers == 18
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("name", ["vanilla", "card_of_a_test.py:mine", "mine_by_name"])
def test_the_card_says_when_a_transition_must_be_imported_first(tmp_path, monkeypatch, name):
    file = tmp_path / "card_of_a_test.py"
    text = "import looptim as lo\ndef mine(width, steps): return lo.build('vanilla', width=width, steps=steps)\n"
    file.write_text(text + "lo.PRESETS['mine_by_name'] = mine\n")
    monkeypatch.chdir(tmp_path)
    # The name is known to monkeypatch before the file registers it, so that it is gone after the test.
    monkeypatch.setitem(lo.PRESETS, "mine_by_name", lo.PRESETS["vanilla"])
    lo.import_code(file.name)
    lo.train(config(model={"loop": {"preset": name}}, steps=3), "run", progress=False)
    card = (lo.export("run") / "README.md").read_text()
    own = name != "vanilla"
    assert (f"`{name}`, which is not in this folder" in card) == own
    assert ("looptim.import_code(" in card) == own and ("`looptim.presets`" in card) == own
