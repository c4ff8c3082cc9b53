"""LoopedLM against an independently written reference, and the contracts of a model."""

import functools

import pytest
import torch
import torch._dynamo.testing
from reference import reference_logits
from torch.utils.flop_counter import FlopCounterMode

import looptim as lo
from looptim.config import ModelConfig
from looptim.loop.depth import Fixed, PerSequence
from looptim.model import Layout, balance_update
from looptim.model.attention import causal_attention
from looptim.model.lm import LoopedLM
from looptim.model.rope import rope_table

# Several heads to a key, a window that is soon left, and no two sizes the same where mixing them up should show.
SIZES = {"vocab_size": 61, "max_length": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "window": 5}
SIZES |= {"sliding_rotary": 8, "full_rotary": 4, "dense_hidden": 48, "experts": 6, "shared_hidden": 24}


def config(layout="2-2x3-1", preset="operloop", options=None, **changes):
    loop = {"preset": preset, "options": options or {}}
    return ModelConfig.tiny(**SIZES | {"layout": layout, "loop": loop, "tied": False, "init_std": 0.006} | changes)


def scramble(model, seed=0):
    """Generic weights and router biases: zeros and a tiny initial scale would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("bias"))]:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        tensor.data.add_(0.2 * noise)
    return model


def tokens(batch=2, length=13, seed=0):
    return torch.randint(SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        {"preset": "operloop"},
        {"preset": "hyperloop"},
        {"preset": "operloop", "options": {"shared": True}},
        {"preset": "hyperloop", "options": {"streams": 2}, "layout": "1-1x2-1x3-1"},
        {"preset": "operloop", "layout": "0-2x2-0", "tied": True},
        {"preset": "operloop", "qk_norm": False, "pattern": "SSF"},
        {"preset": "operloop", "balance": "per_visit"},
        {"preset": "operloop", "balance": "per_visit", "router": "per_visit"},
        {"preset": "none", "layout": "3"},
    ],
    ids=str,
)
def test_the_whole_model_equals_a_straight_line_reference(case):
    model = scramble(LoopedLM(config(**case), seed=0).double())
    expected = reference_logits(model.config, dict(model.state_dict()), tokens())
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-9, atol=1e-9)


def rms_normed(x, gain, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + gain)


def through(model, h, blocks, *, visit=0):
    """Some blocks of a model after each other."""
    layers, positions = Layout.of(model.config).blocks, torch.arange(h.shape[1])
    for block in blocks:
        kind = layers[block].attention
        rope = rope_table(positions, kind.rotary_width, kind.theta, dtype=h.dtype)
        h, *_ = model.blocks[block](h, functools.partial(causal_attention, window=kind.window), rope, visit)
    return h


@pytest.mark.parametrize("layout", ["2x3", "0-2x3-0"])
def test_ouro_as_released_has_no_norm_after_that_in_its_loop(layout):
    """logits = W y_R with y' = RMSNorm(Blocks(y)): a second norm would give logits that are off by several percent."""
    model = scramble(LoopedLM(config(layout, "vanilla", {"loop_norm": True}, norm_eps=0.01), seed=0).double())
    gain = model.loops[0].transitions[0].target.gain
    y = model.embedding(tokens())
    for step in range(3):
        y = rms_normed(through(model, y, (0, 1), visit=step), gain, 0.01)
    torch.testing.assert_close(model(tokens()), model.head(y), rtol=1e-9, atol=1e-9)
    assert not any(name.startswith("norm.") for name in model.state_dict())
    assert (model.head(rms_normed(y, gain, 0.01)) - model.head(y)).norm() > 0.05 * model.head(y).norm()


def test_huginn_as_released_norms_what_its_loop_returns():
    """coda(RMSNorm(y_R)), with the eps of the model."""
    options = {"inject": "concat", "start": "prelude", "readout_norm": True}
    model = scramble(LoopedLM(config("1-1x2-1", "huginn", options, norm_eps=0.01), seed=0).double())
    loop = model.loops[0]
    e = y = through(model, model.embedding(tokens()), (0,))
    for step in range(2):
        o = loop.transitions[0].projection(lo.Context(y.unsqueeze(-2), None, e))
        y = through(model, o[0].read(y.unsqueeze(-2)) + o[1], (1,), visit=step)
    h = through(model, rms_normed(y, loop.readout.gain, 0.01), (2,))
    h = rms_normed(h, model.norm.gain, 0.01)
    torch.testing.assert_close(model(tokens()), model.head(h), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("preset", [name for name in lo.PRESETS if name != "none"])
def test_every_preset_trains_every_parameter_and_sees_no_later_token(preset):
    model = scramble(LoopedLM(config(preset=preset), seed=0))
    batch = tokens()
    out = model.loss(batch[:, :-1], batch[:, 1:])
    out.loss.backward()
    assert out.loss.isfinite()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name
    model.double().eval()
    changed = batch.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % SIZES["vocab_size"]
    before, after = model(batch), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_loss_is_the_mean_cross_entropy_plus_the_auxiliary_loss():
    model = scramble(LoopedLM(config(), seed=0).double())
    batch, targets = tokens()[:, :-1], tokens()[:, 1:].clone()
    targets[0, :4] = -100
    out = model.loss(batch, targets)
    expected = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(out.cross_entropy, expected)
    without = LoopedLM(config(aux_coefficient=0.0), seed=0).double()
    without.load_state_dict(model.state_dict())
    torch.testing.assert_close(without.loss(batch, targets).loss, expected)
    assert out.loss > expected


def test_loads_count_every_visit_once_with_and_without_checkpointing():
    model = scramble(LoopedLM(config(), seed=0))
    batch = tokens()
    plain = model.loss(batch[:, :-1], batch[:, 1:])
    plain.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.checkpointing = True
    again = model.loss(batch[:, :-1], batch[:, 1:])
    again.loss.backward()
    assert {name: load.shape[0] for name, load in plain.loads.items()} == {
        "blocks.1.feedforward": 1,
        "blocks.2.feedforward": 3,
        "blocks.3.feedforward": 3,
        "blocks.4.feedforward": 1,
    }
    for name, load in plain.loads.items():
        assert (load.sum(-1) == 2 * 12 * config().top_k).all()
        assert torch.equal(load, again.loads[name])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name])


def test_a_sequence_that_waits_for_its_first_loop_is_not_counted():
    model = scramble(LoopedLM(config(options={"shared": True}), seed=0).double())
    batch = tokens(batch=3)
    x, y = batch[:, :-1], batch[:, 1:]
    out = model.loss(x, y, depth=PerSequence([1, 3, 1], total=4))
    alone = [model.loss(x[i : i + 1], y[i : i + 1], depth=Fixed(n)) for i, n in enumerate((1, 3, 1))]
    for name, load in out.loads.items():
        if len(load) == 1:
            assert torch.equal(load, sum(a.loads[name] for a in alone))
        else:
            one, three, other = (a.loads[name] for a in alone)
            waiting = torch.zeros_like(one)
            assert torch.equal(load, torch.cat([waiting, three]) + torch.cat([waiting] * 3 + [one + other]))
    together = sum(a.cross_entropy for a in alone) / 3
    torch.testing.assert_close(out.cross_entropy, together)


DOCUMENTS = [[1, 7, 16], [24], [9, 9, 6]]
"""Lengths of the documents in three sequences of 24 tokens: shorter and longer than the window of 5."""


def packed_batch():
    batch = tokens(3, 25)
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in DOCUMENTS])
    return batch[:, :-1], batch[:, 1:], ids


@pytest.mark.long
@pytest.mark.parametrize("preset", ["vanilla", "operloop", "hyperloop"])
@pytest.mark.parametrize("pattern", ["S", "F", "SF"])
def test_documents_that_share_a_sequence_are_as_if_each_were_alone(preset, pattern):
    model = scramble(LoopedLM(config(preset=preset, pattern=pattern, aux_coefficient=0.0), seed=0).double())
    x, y, ids = packed_batch()
    out = model.loss(x, y, documents=ids)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(out.loss, weights)
    rows = zip(x, y, DOCUMENTS, strict=True)
    alone = [
        model.loss(a.unsqueeze(0), b.unsqueeze(0))
        for tokens_, targets, row in rows
        for a, b in zip(tokens_.split(row), targets.split(row), strict=True)
    ]
    lengths = [length for row in DOCUMENTS for length in row]
    together = sum(n * one.loss for n, one in zip(lengths, alone, strict=True)) / sum(lengths)
    torch.testing.assert_close(out.loss, together, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients, torch.autograd.grad(together, weights), rtol=1e-8, atol=1e-10)
    for name, load in out.loads.items():
        assert torch.equal(load, sum(one.loads[name] for one in alone))
    assert abs(out.loss - model.loss(x, y).loss) > 1e-3


def test_documents_that_cannot_be_kept_apart_are_refused():
    x, y, ids = packed_batch()
    model = LoopedLM(config(preset="full_bandwidth", options={"token_shift": True}), seed=0)
    with pytest.raises(ValueError, match="full_bandwidth reads the state of the token before, which may be of another"):
        model.loss(x, y, documents=ids)
    with pytest.raises(ValueError, match=r"documents must have the shape of tokens, \(3, 24\), got \(1, 24\)"):
        LoopedLM(config(), seed=0).loss(x, y, documents=ids[:1])


def test_without_gradients_the_head_multiplies_once():
    head, h = LoopedLM(config(), seed=0).head, torch.randn(1, 5, config().width)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        head(h, torch.zeros(1, 5, dtype=torch.long))
    assert counter.get_total_flops() == 2 * 5 * head.weight.numel()


@pytest.mark.long
@pytest.mark.parametrize("balance", ["pooled", "per_visit"])
def test_updating_the_router_bias_balances_the_model(balance):
    model = LoopedLM(config(balance=balance), seed=0)
    # A router that sends nearly everything to one expert.
    for block in model.blocks[1:]:
        block.feedforward.router.weight.data *= 50
    batch = tokens(8, 32)

    def imbalance():
        loads = torch.cat([load.float() for load in model.loss(batch[:, :-1], batch[:, 1:]).loads.values()])
        return (loads.max(-1).values / loads.mean(-1)).mean().item()

    before = imbalance()
    for _ in range(60):
        out = model.loss(batch[:, :-1], batch[:, 1:])
        for name, load in out.loads.items():
            moe = model.get_submodule(name)
            rows = load if balance == "per_visit" else load.sum(0, keepdim=True)
            moe.bias.copy_(balance_update(moe.bias, rows, rate=5e-3))
    assert imbalance() - 1 < 0.5 * (before - 1)


def test_models_that_share_a_part_start_with_the_same_weights_in_it():
    one, other = LoopedLM(config(), seed=3).state_dict(), LoopedLM(config(preset="hyperloop"), seed=3).state_dict()
    deeper = LoopedLM(config(layout="2-2x6-1"), seed=3).state_dict()
    for name, weight in one.items():
        if not name.startswith("loops."):
            assert torch.equal(weight, other[name]), name
        assert torch.equal(weight, deeper[name]), name
    different = LoopedLM(config(), seed=4).state_dict()
    assert not torch.equal(one["head.weight"], different["head.weight"])
    torch.manual_seed(0)
    first, second = LoopedLM(config()), LoopedLM(config())
    assert not torch.equal(first.head.weight, second.head.weight)


def test_a_model_with_a_router_per_visit_starts_as_the_one_with_a_shared_router():
    shared, own = (LoopedLM(config(router=router), seed=3) for router in ("shared", "per_visit"))
    assert torch.equal(shared(tokens()), own(tokens()))
    weights = {name: p.shape for name, p in own.named_parameters() if name.endswith("router.weight")}
    known = dict(shared.named_parameters())
    # A layer that is not looped has one router either way.
    assert {len(shape) for shape in weights.values()} == {2, 3}
    own.loss(tokens(), tokens()).loss.backward()
    for name, shape in weights.items():
        if len(shape) == 3:
            router = own.get_parameter(name)
            assert torch.equal(router[1], known[name]) and not torch.equal(router.grad[0], router.grad[1])


def test_initial_weights_have_the_standard_deviation_of_the_config():
    model = LoopedLM(config(width=128, init_std=0.02), seed=0)
    for name, p in model.named_parameters():
        if p.dim() > 1 and not name.startswith("loops."):
            assert p.std().item() == pytest.approx(0.02, rel=0.1), name
        elif name.endswith("gain"):
            assert p.abs().max() == 0


def test_a_shared_transition_runs_any_number_of_loops():
    model = scramble(LoopedLM(config(options={"shared": True}), seed=0)).eval()
    longer = LoopedLM(config(layout="2-2x5-1", options={"shared": True}), seed=0).eval()
    longer.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens(), depth=Fixed(5)), longer(tokens()))
    with pytest.raises(ValueError, match="loop-specific parameters for 3 steps and cannot run 5"):
        LoopedLM(config(), seed=0)(tokens(), depth=Fixed(5))
    with pytest.raises(ValueError, match="counts has 3 numbers of steps, but the batch has 2 sequences"):
        model.loss(tokens(), tokens(), depth=PerSequence([1, 2, 3]))
    with pytest.raises(ValueError, match=r"layout '3' has no looped segment, so Fixed\(steps=5.*\) cannot be run"):
        LoopedLM(config(layout="3", preset="none"), seed=0)(tokens(), depth=Fixed(5))


def test_trace_looks_inside_a_model():
    model = LoopedLM(config(layout="1-1x2-1x3-1"), seed=0)
    with torch.no_grad(), lo.trace(model) as trace:
        model(tokens())
    assert len(trace.read) == 5


def test_observe_sees_every_unrolled_layer():
    model, seen = LoopedLM(config(), seed=0), []
    model.hidden(model.embed(tokens()), observe=seen.append)
    assert len(seen) == len(Layout.of(model.config).layers) == 9


@pytest.mark.long
def test_compiled_blocks_give_the_same_logits_and_are_compiled_once_for_all_loops():
    model = scramble(LoopedLM(config(), seed=0)).eval()
    expected = model(tokens())
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model.compile_blocks(fullgraph=True, backend=counter)
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-4, atol=1e-5)
    once = counter.frame_count
    model(tokens())
    assert counter.frame_count == once
    # One for each kind of attention, sliding or full, and of feed-forward, and not one for each of the nine layers.
    assert once <= 4


@pytest.mark.long
def test_compiled_blocks_keep_documents_apart_and_are_not_compiled_anew_for_others():
    plain, model = (scramble(LoopedLM(config(), seed=0)) for _ in range(2))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model.compile_blocks(backend=counter)
    frames = set()
    for seed in range(4):
        x, y, _ = packed_batch()
        ids = torch.randint(2, x.shape, generator=torch.Generator().manual_seed(seed)).cumsum(1) // 3
        losses = [each.loss(x, y, documents=ids).loss for each in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        losses[1].backward()
        frames.add(counter.frame_count)
    assert len(frames) == 1 and all(p.grad.isfinite().all() for p in model.parameters())


def test_it_learns():
    torch.manual_seed(0)
    model = LoopedLM(config(init_std=0.05), seed=0)
    batch = tokens(4, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = last = None
    for _ in range(30):
        out = model.loss(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        first, last = first or out.cross_entropy.item(), out.cross_entropy.item()
    assert last < 0.7 * first


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor([[0, 61]]), "token 61 is out of range: the vocabulary has 61"),
        (torch.tensor([[-1, 0]]), "token -1 is out of range"),
        (torch.zeros(1, 65, dtype=torch.long), "65 tokens, but max_length is 64"),
        (torch.zeros(1, 0, dtype=torch.long), "with at least one"),
        (torch.zeros(1, 2), "tokens must be a tensor of whole numbers, got torch.float32"),
        (None, "tokens must be a tensor of whole numbers, got NoneType"),
        (torch.zeros(4, dtype=torch.long), r"tokens must have the shape \(batch, length\) .* got \(4,\)"),
    ],
)
def test_bad_tokens_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        LoopedLM(config(), seed=0)(bad)


def test_bad_targets_and_configs_are_refused():
    model = LoopedLM(config(), seed=0)
    with pytest.raises(ValueError, match=r"targets must have the shape of tokens, \(2, 13\), got \(2, 12\)"):
        model.loss(tokens(), tokens()[:, 1:])
    with pytest.raises(ValueError, match="token 61 is out of range"):
        model.loss(tokens(), torch.full((2, 13), 61))
    with pytest.raises(ValueError, match="LoopedLM takes a ModelConfig"):
        LoopedLM({"layout": "2"})
    with pytest.raises(ValueError, match="count takes a Config or a ModelConfig, got str"):
        lo.count("recipes/nano.toml")


def test_a_wrong_preset_or_option_is_found_before_anything_is_allocated():
    big = {"width": 2**20, "layout": "64-1x2-0"}
    with pytest.raises(ValueError, match="unknown preset 'operlop', did you mean 'operloop'"):
        LoopedLM(config(preset="operlop", **big))
    with pytest.raises(ValueError, match="operloop has no option 'stream'"):
        LoopedLM(config(options={"stream": 4}, **big))


@pytest.mark.parametrize("layout", ["4", "2-2x3-1"])
def test_flops_agree_with_torchs_counter_on_a_real_forward(layout):
    """All but the transition's elementwise work, and attention scores, of which torch counts the whole square."""
    T = 16
    preset = "none" if layout == "4" else "operloop"
    small = config(layout, preset, window=T)
    counted = lo.count(small, seq_len=T).flops
    gates = 2 * 9 * 4 * config().width * 3 if preset == "operloop" else 0
    matmuls = sum(n for part, n in counted.items() if part not in ("attention scores", "transition")) + gates
    model = LoopedLM(small, seed=0)
    for loop in model.loops:
        loop.set_form("readable")
    with FlopCounterMode(display=False) as counter:
        model(tokens(2, T))
    # On a CPU torch has no formula for its attention kernel: what it counts is the rest.
    assert counter.get_total_flops() == 2 * T * matmuls
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model.to("meta")(torch.zeros(2, T, dtype=torch.long))
    square = counted["attention scores"] * T / ((T + 1) / 2)
    assert counter.get_total_flops() == 2 * T * (matmuls + square)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["operloop", "vanilla", "parcae"])
def test_the_forward_of_a_training_step_compiles_whole(preset):
    model = LoopedLM(ModelConfig.tiny(layout="1-2x3-1", loop={"preset": preset}), seed=0).eval()
    tokens = torch.randint(257, (2, 16))
    torch._dynamo.reset()
    compiled = torch.compile(lambda tokens: model.loss(tokens, tokens).loss, fullgraph=True, backend="aot_eager")
    loss = compiled(tokens)
    torch.testing.assert_close(loss, model.loss(tokens, tokens).loss)
    loss.backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.loss(tokens, tokens).loss.backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in model.parameters()], rtol=1e-4, atol=1e-6)


def test_a_few_tokens_have_the_logits_of_many():
    model = LoopedLM(ModelConfig.tiny(layout="1-2x3-1", max_length=256), seed=0).eval()
    tokens = torch.randint(257, (1, 200))
    with torch.no_grad():
        many, few = model(tokens), model(tokens[:, :3])
    torch.testing.assert_close(few, many[:, :3], rtol=1e-5, atol=1e-5)
