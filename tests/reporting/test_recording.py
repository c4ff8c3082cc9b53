"""What is recorded of a model is what `lo.trace`, its logits, its routers and plain attention say."""

import pytest
import torch

import looptim as lo
from looptim.model.attention import Attention
from looptim.model.moe import Router
from looptim.reporting.recording import record

IDS = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33]


def make(preset="operloop", layout="1-2x3-1", **options):
    config = lo.ModelConfig.tiny(layout=layout, loop={"preset": preset, "options": options})
    model = lo.LoopedLM(config, seed=0)
    # Weights as large as trained ones, so that the rows differ.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model.eval()


def near(values, expected, digits=5):
    torch.testing.assert_close(torch.tensor(values), expected.float(), rtol=10**-digits * 5.1, atol=1e-7)


@pytest.mark.parametrize("preset", ["operloop", "hyperloop", "huginn", "parcae", "recurrentgpt", "operloop_muon"])
def test_the_last_row_is_what_the_model_says(preset):
    model = make(preset)
    lens = record(model, IDS)["lens"]
    chances = model(torch.tensor([IDS]))[0].softmax(-1).detach()
    values, places = chances.topk(10)
    assert lens["top"][-1] == places.tolist()
    near(lens["probability"][-1], values)
    true = chances[:-1].gather(1, torch.tensor(IDS[1:]).unsqueeze(1))
    near(lens["true"][-1][:-1], true.squeeze(1))
    assert lens["rank"][-1][:-1] == ((chances[:-1] > true).sum(-1) + 1).tolist() and lens["rank"][-1][-1] is None
    assert max(lens["kl"][-1]) < 1e-6


@pytest.mark.parametrize("preset", ["vanilla", "parcae", "huginn"])
def test_a_row_of_a_shared_transition_is_the_model_with_fewer_loops(preset):
    model = make(preset)
    lens = record(model, IDS)["lens"]
    last = model(torch.tensor([IDS]))[0].log_softmax(-1)
    for loops in (1, 2):
        logs = model(torch.tensor([IDS]), depth=lo.depth.Fixed(loops))[0].log_softmax(-1).detach()
        values, places = logs.topk(10)
        assert lens["top"][loops] == places.tolist()
        near(lens["probability"][loops], values.exp())
        kl = torch.nn.functional.kl_div(logs, last, log_target=True, reduction="none").sum(-1)
        torch.testing.assert_close(torch.tensor(lens["kl"][loops]), kl.detach(), rtol=1e-3, atol=1e-5)


def test_more_loops_than_the_layout_says():
    model = make("vanilla")
    found = record(model, IDS, loops=5)
    assert [row["step"] for row in found["rows"]] == [0, 1, 2, 3, 4, 5]
    deep = model(torch.tensor([IDS]), depth=lo.depth.Fixed(5))[0].softmax(-1).topk(10)
    assert found["lens"]["top"][-1] == deep.indices.tolist()
    with pytest.raises(ValueError, match="cannot run 5"):
        record(make(), IDS, loops=5)


def test_an_answer_settles_where_it_stays():
    lens = record(make("vanilla", layout="1-2x6-1"), IDS)["lens"]
    for token, settles in enumerate(lens["settles"]):
        says = [row[token][0] for row in lens["top"]]
        assert all(answer == says[-1] for answer in says[settles:])
        assert settles == 0 or says[settles - 1] != says[-1]
    assert len(set(lens["settles"])) > 1


def test_quantities_are_those_of_the_trace():
    model = make("hyperloop")
    found = {quantity["key"]: quantity["values"] for quantity in record(model, IDS)["quantities"]}
    with lo.trace(model) as trace, torch.no_grad():
        model(torch.tensor([IDS]))
    last = trace.state[-1][0].flatten(1)
    for step in range(3):
        before, after = (state[0].flatten(1) for state in trace.state[step : step + 2])
        near(found["objective"][step + 1], trace.objective[step][0])
        near(found["step_size"][step + 1], torch.ones(len(IDS)))
        near(found["decay"][step + 1], trace.decay[step][0, :, :, 0])
        near(found["read"][step + 1], trace.input_map[step].h[0])
        near(found["write"][step + 1], trace.write_map[step].h[0])
        near(found["moved"][step + 1], (after - before).norm(dim=1) / before.norm(dim=1))
        near(found["state_norm"][step + 1], after.square().mean(1).sqrt())
        near(found["cosine"][step + 1], (after * last).sum(1) / after.norm(dim=1) / last.norm(dim=1))
    assert found["objective"][0] is None and len(found["state_norm"][0]) == len(IDS)


@pytest.mark.parametrize("preset", list(lo.PRESETS))
def test_every_preset_can_be_looked_at(preset):
    layout = "1-2-1" if preset == "none" else "1-2x3-1"
    if preset == "none":
        with pytest.raises(ValueError, match="nothing to trace"):
            record(make(preset, layout), IDS)
        return
    found = record(make(preset), IDS)
    for quantity in found["quantities"]:
        assert all(values is None or len(values) == len(IDS) for values in quantity["values"])
    assert len(found["rows"]) == len(found["lens"]["top"]) == 4


def test_attention_is_the_mean_of_the_heads_softmax():
    model, calls = make(), []

    def keep(module, args):
        hidden, attend, rope = args

        def watching(q, k, v):
            calls.append((q, k))
            return attend(q, k, v)

        return hidden, watching, rope

    handles = [part.register_forward_pre_hook(keep) for part in model.modules() if isinstance(part, Attention)]
    with torch.no_grad():
        model(torch.tensor([IDS]))
    for handle in handles:
        handle.remove()
    layers = record(model, IDS)["layers"]
    assert [(layer["place"], len(layer["attention"])) for layer in layers] == [
        ("before the loop", 1),
        ("in the loop", 3),
        ("in the loop", 3),
        ("after the loop", 1),
    ]
    order = [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (3, 0)]
    for (block, visit), (q, k), layer in zip(order, calls, lo.model.Layout.of(model.config).layers, strict=True):
        distance = torch.arange(len(IDS)).unsqueeze(1) - torch.arange(len(IDS))
        hidden = (distance < 0) | (distance >= (layer.attention.window or 1000))
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)[0].mean(0)
        seen = layers[block]["attention"][visit]
        near(seen["weight"], weights.gather(1, torch.tensor(seen["source"])), digits=3)
        near(seen["weight"], weights.topk(8).values, digits=3)


def test_experts_are_the_routers_choice():
    model, calls = make(), []
    handles = [
        part.register_forward_hook(lambda _, __, out: calls.append(out))
        for part in model.modules()
        if isinstance(part, Router)
    ]
    with torch.no_grad():
        model(torch.tensor([IDS]))
    for handle in handles:
        handle.remove()
    visits = [visit for layer in record(model, IDS)["layers"][1:] for visit in layer["experts"]]
    assert len(visits) == len(calls)
    found = sorted(sorted(map(sorted, visit["chosen"])) for visit in visits)
    assert found == sorted(sorted(map(sorted, routing.indices.tolist())) for routing in calls)


def test_recording_changes_nothing():
    model = make().train()
    before = model.eval()(torch.tensor([IDS]))
    record(model.train(), IDS)
    assert model.training
    assert torch.equal(before, model.eval()(torch.tensor([IDS])))


def test_exits_leave_where_depth_says():
    # With a window of one token nobody sees another, so that who leaves changes nothing for those who stay.
    config = lo.ModelConfig.tiny(layout="1-1x6-1", window=1, pattern="S", loop={"preset": "vanilla"})
    model = lo.LoopedLM(config, seed=0).eval()
    for exit in record(model, IDS)["exits"]:
        values = torch.tensor(exit["values"])
        threshold = float(values[values < 1e30].median()) * 1.0001
        for minimum in (1, 3):
            below = [values[:, i].lt(threshold).nonzero().flatten() + 1 for i in range(len(IDS))]
            expected = [min([int(step) for step in steps if step >= minimum], default=6) for steps in below]
            policy = lo.depth.Exit(exit["signal"], threshold, minimum)
            assert depths_of(model, policy) == expected, exit["signal"]


def test_where_tokens_really_left():
    model = make("vanilla").eval()
    policy = lo.depth.Exit("change", 0.9, 2)
    left = record(model, IDS, depth=policy)["left"]
    assert left["depths"] == depths_of(model, policy) and left["rule"].startswith("change < 0.9, minimum 2")
    chances = model(torch.tensor([IDS]), depth=policy)[0].softmax(-1)
    assert left["says"] == chances.argmax(-1).tolist()
    near(left["probability"], chances.amax(-1).detach(), digits=4)
    with pytest.raises(ValueError, match="lets no token leave"):
        record(model, IDS, depth=lo.depth.Fixed(2))


def depths_of(model, policy):
    seen = []
    handle = model.loops[0].register_forward_hook(lambda _, __, out: seen.append(out[1].depth))
    with torch.no_grad():
        model.hidden(model.embed(torch.tensor([IDS])), depth=policy)
    handle.remove()
    return seen[0][0].tolist()


def test_a_looped_decoder_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 257}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4, **sizes))
    model = lo.loop_model(base, "1-2x3-1", "vanilla").eval()
    found = record(model, IDS)
    chances = model(torch.tensor([IDS])).logits[0].softmax(-1).detach()
    near(found["lens"]["probability"][-1], chances.topk(10).values, digits=4)
    assert [(layer["place"], len(layer["attention"])) for layer in found["layers"]] == [
        ("before the loop", 1),
        ("in the loop", 3),
        ("in the loop", 3),
        ("after the loop", 1),
    ]
    assert all(sum(row) <= 1.01 for visit in found["layers"][1]["attention"] for row in visit["weight"])
    assert model.config._attn_implementation == "sdpa"
    deeper = record(model, IDS, loops=5)
    assert len(deeper["rows"]) == 6 and model.config.loops is None and len(deeper["layers"][1]["attention"]) == 5
    model.set_loops(5)
    near(deeper["lens"]["true"][-1][:-1], _true(model), digits=4)


def _true(model):
    chances = model(torch.tensor([IDS])).logits[0].softmax(-1).detach()
    return chances[:-1].gather(1, torch.tensor(IDS[1:]).unsqueeze(1)).squeeze(1)


@pytest.mark.long
def test_a_decoder_of_transformers_is_seen_at_every_visit():
    transformers = pytest.importorskip("transformers")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 257, "initializer_range": 0.2}
    base = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**heads, **experts, **sizes))
    model = lo.loop_model(base.eval(), layout="1-2x3-1", preset="vanilla").eval()
    tokens, routed = torch.tensor([IDS]), []
    gates = [
        part.register_forward_hook(lambda _, __, out: routed.append(out[-1]))
        for part in model.modules()
        if type(part).__name__ == "Qwen3MoeTopKRouter"
    ]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        seen = model(tokens, use_cache=False, output_attentions=True).attentions
    for gate in gates:
        gate.remove()
    layers = record(model, IDS)["layers"]
    order = [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (3, 0)]
    for (layer, visit), weights, chosen in zip(order, seen, routed, strict=True):
        near(layers[layer]["attention"][visit]["weight"], weights[0].mean(0).topk(8).values, digits=3)
        assert torch.equal(
            torch.tensor(layers[layer]["experts"][visit]["chosen"]).sort(-1).values, chosen.sort(-1).values
        )
    # Other loops than it was made with, and tokens that leave; the model is left as it was.
    deep = record(model, IDS, loops=5)
    assert [(len(each["attention"]), len(each["experts"])) for each in deep["layers"]] == [
        (1, 1),
        (5, 5),
        (5, 5),
        (1, 1),
    ]
    exits = {each["signal"]: torch.tensor(each["values"]) for each in record(model, IDS)["exits"]}
    assert len(exits) == 6
    rule = lo.depth.Exit("entropy", float(exits["entropy"].median()), 1)
    left = record(model, IDS, depth=rule)["left"]["depths"]
    model.set_depth(rule)
    with torch.no_grad():
        assert left == model(tokens, use_cache=False).depth[0][0].tolist() and len(set(left)) > 1
        record(model, IDS)
        assert left == model(tokens, use_cache=False).depth[0][0].tolist()
