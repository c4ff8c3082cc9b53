"""TRL's trainers, where TRL is installed."""

import pytest
import torch
from hf_models import wrapped
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import looptim as lo

pytestmark = pytest.mark.slow
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def looped_llama():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return lo.loop_model(LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes)), "1-2x2-1", "operloop")


MODELS = {"ours": wrapped, "a looped Llama": looped_llama}


def tokenizer():
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(64)} | {"user": 62, "assistant": 63}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1", pad_token="t2")
    fast.chat_template = TEMPLATE
    return fast


def settings(folder, **more):
    return {
        "output_dir": folder,
        "max_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    } | more


def changed(model, before):
    return any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_sft_trains_on_messages(name, tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets")
    rows = [
        {"messages": [{"role": "user", "content": "t3 t4"}, {"role": "assistant", "content": f"t{i}"}]}
        for i in range(8)
    ]
    model = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(**settings(tmp_path, max_length=16)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    assert changed(model, before)


@pytest.mark.parametrize("name", MODELS)
def test_grpo_trains_on_a_reward(name, tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets")
    model = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **others: [float(len(text) % 7) for text in completions],
        args=trl.GRPOConfig(
            **settings(
                tmp_path, num_generations=2, per_device_train_batch_size=2, max_completion_length=6, learning_rate=0.1
            )
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "t3 t4"}, {"prompt": "t5"}] * 4),
        processing_class=tokenizer(),
    )
    trainer.train()
    assert changed(model, before)
