"""Which layers to loop."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import looptim as lo
from looptim.reporting.layers import draw_layers

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4}


def model():
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.2, **SIZES)).eval()


def texts():
    return list(torch.randint(64, (3, 1, 16)))


@torch.no_grad()
def test_influence_and_angle_by_hand():
    base, tokens = model(), texts()[:1]
    h = base(tokens[0], output_hidden_states=True).hidden_states
    chosen = lo.choose_layers(base, tokens, size=2)
    cosine = torch.nn.functional.cosine_similarity
    assert chosen.influence[1] == pytest.approx((1 - cosine(h[1], h[2], dim=-1)).median().item(), abs=1e-6)
    angle = cosine(h[1], h[3], dim=-1).arccos() / torch.pi
    assert chosen.angle[1] == pytest.approx(angle.median().item(), abs=1e-6)


@pytest.mark.long
@torch.no_grad()
def test_contraction_by_hand():
    base, tokens = model(), texts()[:1]
    chosen = lo.choose_layers(base, tokens, size=2)
    twice = lo.loop_model(base, "1-2x2-2", "vanilla")
    h = twice(tokens[0], output_hidden_states=True).hidden_states
    ratio = (h[5] - h[3]).norm(dim=-1) / (h[3] - h[1]).norm(dim=-1)
    assert chosen.contraction[1] == pytest.approx(ratio.median().item(), rel=1e-5)


@pytest.mark.long
def test_layers_that_do_nothing_are_recommended(tmp_path):
    base = model()
    with torch.no_grad():
        for layer in base.model.layers[2:4]:
            layer.self_attn.o_proj.weight *= 1e-3
            layer.mlp.down_proj.weight.zero_()
    chosen = lo.choose_layers(base, texts(), size=2)
    assert min(range(4), key=chosen.angle.__getitem__) == 2
    assert chosen.layout(3).count("x3") == 1 and "Loop layers" in str(chosen) and "\n" not in str(chosen)
    assert draw_layers(chosen, tmp_path / "layers.svg").read_text().startswith("<?xml")


def test_bad_input_is_a_sentence():
    for arguments, message in (
        (([],), "give at least one"),
        ((["a text"],), "give their tokenizer too"),
    ):
        with pytest.raises(ValueError, match=message):
            lo.choose_layers(model(), *arguments)
    with pytest.raises(ValueError, match="size must be from 1 to 5"):
        lo.choose_layers(model(), texts(), size=6)
