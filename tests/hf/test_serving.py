"""Where people talk to a model: a terminal, and a server."""

import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from hf_models import wrapped
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from looptim.hf.serving import chat, model_folder

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}"
TEMPLATE += "says{% endif %}"


def exported(folder, template=None):
    """A model, and a tokenizer of 64 words."""
    model = wrapped()
    model.save_pretrained(folder)
    words = [*(f"t{i}" for i in range(61)), "user", "assistant", "says"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1", pad_token="t0")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return model


def test_a_conversation_follows_the_chat_template(tmp_path, capsys):
    model = exported(tmp_path, TEMPLATE)
    messages = chat(tmp_path, ["t5 t6", "t7"], max_new_tokens=4, temperature=0)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    prompt = torch.tensor([[61, 5, 6, 63]])
    answer = model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=1, pad_token_id=0)[0, 4:]
    expected = " ".join(["user", "assistant", "says"][i - 61] if i > 60 else f"t{i}" for i in answer.tolist() if i > 1)
    assert messages[1]["content"].split() == expected.split() and expected.split()[0] in capsys.readouterr().out


def test_without_a_template_the_text_goes_on(tmp_path):
    exported(tmp_path)
    assert len(chat(tmp_path, ["t5 t6 t7"], max_new_tokens=3, temperature=0)) == 2


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no exported model; give a folder that"):
        model_folder(tmp_path)


@pytest.mark.slow
def test_a_server_completes_in_the_words_of_openai(tmp_path):
    pytest.importorskip("fastapi", reason="the server of transformers needs fastapi")
    pytest.importorskip("openai", reason="the server of transformers needs openai")
    exported(tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "looptim", "serve", str(tmp_path), "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        body = {"model": str(tmp_path), "prompt": "t5 t6 t7", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"http://localhost:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        for _ in range(120):
            assert server.poll() is None, server.stderr.read()
            try:
                answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
                break
            except urllib.error.URLError:
                time.sleep(1)
        assert answer["choices"][0]["text"].strip()
    finally:
        server.terminate()
