"""Conversations: a chat template writes them, and only the assistant's words have a loss."""

import itertools
import json

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import looptim as lo
from looptim.data import DataConfig, Tokenizer, open_data
from looptim.data.chat import PLAIN, Chats, chat_text
from looptim.hf.serving import chat
from looptim.model import IGNORE

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] | trim + '<|im_end|>' }}{% endif %}
{{ '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
FORGETFUL = """{% for message in messages %}
{% if message['role'] == 'user' or loop.last %}{{ message['content'] + ';' }}{% endif %}
{% endfor %}"""


def conversation(number):
    said = [("system", "Be brief."), ("user", f"  é {number}? "), ("assistant", f"Ünd {number}."), ("user", "And?")]
    said.append(("assistant", f"No {number}"))
    return [{"role": role, "content": content} for role, content in said]


@pytest.fixture
def chats_file(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": conversation(i)}) + "\n" for i in range(200)))
    return path


@pytest.fixture
def chatml(tmp_path):
    """The folder of a tokenizer with a template and special tokens of its own."""
    tokenizer = Tokenizer.train([PLAIN, json.dumps(conversation(0))], vocab_size=300)._model
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.encode_special_tokens = False
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = CHATML
    fast.save_pretrained(tmp_path / "chatml")
    return tmp_path / "chatml"


def test_ids_are_those_of_transformers_and_marks_are_on_answers(chatml):
    tokenizer, theirs = Tokenizer.load(chatml), AutoTokenizer.from_pretrained(chatml)
    assert tokenizer.chat_template == CHATML and tokenizer.bos_token == "<|im_start|>"
    for template in (CHATML, PLAIN):
        chats = Chats(tokenizer, template)
        theirs.chat_template = template
        messages = conversation(7)
        expected = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        stored = chats.encode_many([chat_text(messages, where="")])[0]
        marks, ids = stored // tokenizer.vocab_size, stored % tokenizer.vocab_size
        assert ids.tolist() == expected
        assert [mark >= 2 for mark in marks] == [False] * (len(ids) - 1) + [True]
        answers = theirs.decode(ids[marks % 2 == 1].tolist())
        assert answers == "Ünd 7.<|im_end|>\nNo 7<|im_end|>\n" if template == CHATML else " Ünd 7.<|im_end|>\n No 7"
        # What a model is asked with ends where the first answer begins.
        asked = theirs.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert expected[: len(asked)] == asked and (marks % 2).argmax() == len(asked)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "chatml"])
def test_batches_have_a_loss_on_answers_alone(kind, chats_file, chatml, cache):
    config = DataConfig(
        source=str(chats_file),
        field="messages",
        template="tokenizer" if kind == "chatml" else "plain",
        tokenizer=str(chatml) if kind == "chatml" else kind,
        cache=str(cache),
    )
    data = open_data(config, vocab_size=310, seq_len=4096, progress=False)
    batch, decode = data.batch("train", seed=0, step=0, batch_size=1), data.tokenizer._model.decode
    answers = decode(batch.targets[batch.targets != IGNORE].tolist())
    # A window may begin and end inside a conversation.
    assert abs(answers.count("Ünd") - answers.count("No ")) <= 1 and answers.count("No ") > 30
    assert "And?" not in answers and "brief" not in answers
    # Conversations follow each other, and a document begins with its system message.
    begins = torch.cat([torch.ones(1, 1), batch.documents.diff()], 1).nonzero()[:, 1]
    assert len(begins) > 30
    lines = [decode(batch.tokens[0, a:b].tolist()) for a, b in itertools.pairwise(begins[1:])]
    assert all(line.lstrip().startswith("system") and line.count("Be brief.") == 1 for line in lines)
    assert "valid_bytes" not in data.fingerprint
    targets = torch.where(batch.targets == IGNORE, 0, 1)
    assert torch.equal(batch.targets[:, :-1][targets[:, :-1] == 1], batch.tokens[:, 1:][targets[:, :-1] == 1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a text", "holds no list of messages; each is an object with a role and a content"),
        ([{"role": "user"}], "a message needs a role and a content, both text, got {'role': 'user'}"),
        ([{"role": "user", "content": "a"}], "no message has the role assistant, so there is nothing to learn"),
        ([{"role": "assistant", "content": "<|endoftext|>"}], r"spells the special token '<\|endoftext\|>', which"),
    ],
)
def test_rows_that_are_no_conversations_are_refused_in_a_sentence(row, message, chats_file, open_):
    with chats_file.open("a") as file:
        file.write(json.dumps({"messages": row}) + "\n")
    with pytest.raises(ValueError, match=message) as error:
        open_(chats_file, field="messages", template="plain")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "holds list, not text; set data.field to one that does, or data.template if it holds conversations"),
        ({"template": "tokenizer"}, "data.template is tokenizer, but that has no chat template"),
        ({"template": "nowhere"}, r"data.template 'nowhere' cannot be read \(No such file or directory\)"),
        ({"template": "plain", "field": "text"}, "has no field 'text' but the fields messages"),
        ({"template": "plain", "source": "stdlib"}, "data.template is for conversations, and 'stdlib' has none"),
        ({"template": "plain", "valid_fraction": 0.0001}, "it has too few conversations"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_a_sentence(options, message, chats_file, open_):
    options = {"field": "messages", "source": chats_file} | options
    with pytest.raises(ValueError, match=message) as error:
        open_(options.pop("source"), **options)
    assert "\n" not in str(error.value)


def test_templates_that_cannot_be_used_are_refused_in_a_sentence():
    for template, message in {
        "{% for %}": "the chat template cannot be read",
        "{{ raise_exception('no system') }}": r"cannot write .* \(no system\); repair either",
        FORGETFUL: "in another way once the conversation goes on",
    }.items():
        with pytest.raises(ValueError, match=message):
            Chats(Tokenizer.bytes(), template).encode_many([chat_text(conversation(1), where="")])


@pytest.mark.long
def test_a_run_on_conversations_exports_its_template_and_answers(chats_file, tmp_path):
    """What it has learned is said after the prompt that it was trained with, and ends there."""
    recipe = tmp_path / "recipe.toml"
    rows = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]] * 4
    rows += [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "yes"}] for i in range(60)]
    chats_file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    recipe.write_text(f"""
[model]
layout = "1-1x2-1"
width = 64
vocab_size = 257
max_length = 64
heads = 4
kv_heads = 2
head_dim = 16
window = 16
sliding_rotary = 16
full_rotary = 8
dense_layers = 4
dense_hidden = 128
[loop]
preset = "vanilla"
[data]
source = "{chats_file}"
field = "messages"
template = "plain"
tokenizer = "bytes"
valid_fraction = 0.2
[optim]
lr = 1e-2
warmup = 5
[train]
steps = 40
valid_every = 40
valid_batches = 1
seq_len = 32
batch_size = 8
""")
    lo.train(lo.load_config(recipe), tmp_path / "run", progress=False)
    folder = lo.export(tmp_path / "run")
    assert AutoTokenizer.from_pretrained(folder).chat_template == PLAIN
    assert chat(tmp_path / "run", ["hi"], temperature=0)[-1]["content"].strip() == "yes"
