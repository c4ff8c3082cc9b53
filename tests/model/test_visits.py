"""Tokens that leave a looped model: its forward against one that is written token by token."""

import functools
import math

import pytest
import torch

import looptim as lo
from looptim.config import ModelConfig
from looptim.loop.depth import Exit, Fixed, PerToken
from looptim.model.lm import LoopedLM
from looptim.model.rope import apply_rope, rope_table


def model_of(preset="operloop", layout="1-2x4-1", seed=0, **changes):
    config = ModelConfig.tiny(layout=layout, init_std=0.2, loop={"preset": preset}, **changes)
    return LoopedLM(config, seed=seed).eval()


def tokens(batch=3, length=20, seed=0):
    return torch.randint(257, (batch, length), generator=torch.Generator().manual_seed(seed))


def spread(model, x, signal="residual"):
    """An exit at a threshold that lets tokens out at several depths."""
    listened, values = lo.signals.find_signal(signal), []

    class Listening(lo.Signal):
        asks = "coda" if listened.asks == "coda" else "logits"

        def forward(self, seen, memory):
            value, memory = listened(seen, memory)
            values.append(value)
            return value + math.inf, memory

    with torch.no_grad():
        model(x, depth=Exit(Listening(), 1.0, mode="mask"))
    value = torch.stack(values)
    return Exit(signal, value[value < 1e30].median().item())


def depth_of(model, x, depth):
    return model.hidden(model.embed(x), depth=depth).depth[0]


def token_by_token(model, x, depths):
    """The hidden states of one sequence of a dense model `0-1xR-0`, each token after those before it are done."""
    block, loop, rounds = model.blocks[0], model.loops[0], model.loops[0].steps
    attention, kind = block.attention, model.config
    keys = [[] for _ in range(rounds)]
    values = [[] for _ in range(rounds)]
    out = []
    for place, token in enumerate(x):
        rope = rope_table(torch.tensor([place]), kind.full_rotary, kind.full_theta, dtype=torch.float64)
        e = model.embedding(token).reshape(1, 1, -1)
        Y, carry = loop.start(e), loop.transitions[0].rule.init(loop.start(e))

        def run(h, visit, rope=rope):
            split = [f(block.attention_norm(h)).unflatten(-1, (-1, kind.head_dim)) for f in (attention.q, attention.k)]
            q, k = (
                apply_rope(norm(t).transpose(1, 2), *rope)
                for norm, t in zip((attention.q_norm, attention.k_norm), split, strict=True)
            )
            v = attention.v(block.attention_norm(h)).unflatten(-1, (-1, kind.head_dim)).transpose(1, 2)
            keys[visit].append(k)
            values[visit].append(v)
            K, V = torch.cat(keys[visit], 2), torch.cat(values[visit], 2)
            weights = (q @ K.transpose(-1, -2) / math.sqrt(kind.head_dim)).softmax(-1)
            h = h + attention.o((weights @ V).transpose(1, 2).flatten(2))
            return h + block.feedforward(block.feedforward_norm(h))

        for visit, transition in enumerate(loop.unroll(int(depths[place]))):
            Y, carry = transition(Y, e, functools.partial(run, visit=visit), carry)
        for skipped in range(int(depths[place]), rounds):
            keys[skipped].append(keys[skipped - 1][-1])
            values[skipped].append(values[skipped - 1][-1])
        out.append(loop.readout(Y))
    return model.norm(torch.cat(out, 1))


@pytest.mark.parametrize("preset", ["vanilla", "operloop", "operloop_heavyball", "huginn", "hyperloop"])
@torch.no_grad()
def test_a_parallel_forward_is_token_by_token_with_the_keys_of_the_last_visit(preset):
    model = model_of(preset, "0-1x4-0", pattern="F", kv_heads=2).double()
    x = tokens(1, 12)
    depths = torch.randint(1, 5, (1, 12), generator=torch.Generator().manual_seed(1))
    parallel = model.hidden(model.embed(x), depth=PerToken(depths))
    torch.testing.assert_close(parallel.h[0], token_by_token(model, x[0], depths[0])[0], rtol=0, atol=1e-11)
    assert torch.equal(parallel.depth[0], depths)
    full = model.hidden(model.embed(x)).h
    assert not torch.allclose(parallel.h, full)


@pytest.mark.parametrize("signal", ["residual", "change", "acceleration", "kl", "entropy", "margin"])
@torch.no_grad()
def test_no_threshold_is_full_depth_and_an_infinite_one_is_one_loop(signal):
    model, x = model_of(), tokens()
    for mode in ("end", "mask"):
        assert torch.equal(model(x, depth=Exit(signal, 0.0, mode=mode)), model(x))
    shared = model_of("vanilla")
    torch.testing.assert_close(shared(x, depth=Exit(signal, math.inf)), shared(x, depth=Fixed(1)), rtol=0, atol=0)
    assert (depth_of(shared, x, Exit(signal, math.inf, minimum=2)) == 2).all()


@pytest.mark.parametrize("signal", ["residual", "kl", "entropy", "margin", "entropy_coda"])
@torch.no_grad()
def test_a_ragged_batch_is_each_row_alone_and_replays(signal):
    model, x = model_of().double(), tokens()
    depth = spread(model, x, signal)
    depths = depth_of(model, x, depth)
    assert depths.unique().numel() > 1
    together = model(x, depth=depth)
    for row in range(3):
        assert torch.equal(depth_of(model, x[row : row + 1], depth)[0], depths[row])
        torch.testing.assert_close(model(x[row : row + 1], depth=depth)[0], together[row], rtol=0, atol=1e-11)
    masked = Exit(depth.signal, depth.threshold, mode="mask")
    torch.testing.assert_close(model(x, depth=masked), together, rtol=0, atol=1e-11)
    torch.testing.assert_close(model(x, depth=PerToken(depths)), together, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("preset", "signal", "dense", "patience"),
    [("operloop_heavyball", "acceleration", 0, 0), ("vanilla", "kl_coda", 9, 0), ("operloop", "residual", 9, 1)],
)
@torch.no_grad()
def test_a_batch_that_sequences_leave_computes_what_a_mask_does(preset, signal, dense, patience):
    model, x = model_of(preset, dense_layers=dense).double(), tokens(8, 2)
    found = spread(model, x, signal)
    masked, compact = (
        model.hidden(model.embed(x), depth=Exit(signal, found.threshold, mode=mode, patience=patience))
        for mode in ("mask", "compact")
    )
    assert torch.equal(compact.depth[0], masked.depth[0])
    torch.testing.assert_close(compact.h, masked.h, rtol=0, atol=1e-11)
    # A sequence leaves when all of its tokens have, and then no block sees it.
    deepest = masked.depth[0].amax(1)
    assert deepest.min() < 4
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda block, args: seen.append(len(args[0])))
    model(x, depth=Exit(signal, found.threshold, mode="compact", patience=patience))
    assert seen == [int((deepest > step).sum()) for step in range(int(deepest.max()))]


@torch.no_grad()
def test_a_reading_through_the_coda_is_what_fewer_loops_would_say():
    model, x = model_of("vanilla", "1-1x4-2"), tokens()
    said = []

    class Listening(lo.Signal):
        asks = "coda"

        def forward(self, seen, memory):
            said.append(seen.logits)
            return seen.logits.new_full(x.shape, math.inf), None

    full = model(x, depth=Exit(Listening(), 1.0))
    torch.testing.assert_close(full, model(x))
    for steps, logits in enumerate(said, 1):
        torch.testing.assert_close(logits, model(x, depth=Fixed(steps)))
    with pytest.raises(ValueError, match="through the layers after the loop, and this layout has none; leave _coda"):
        model_of("vanilla", "1-1x4-0")(x, depth=Exit("kl_coda", 1.0))


@torch.no_grad()
def test_a_prefix_depends_on_nothing_later():
    model, x = model_of().double(), tokens()
    depth = spread(model, x)
    longer, shorter = model(x, depth=depth), model(x[:, :9], depth=depth)
    torch.testing.assert_close(longer[:, :9], shorter, rtol=0, atol=1e-11)


@torch.no_grad()
def test_experts_get_only_the_tokens_that_are_inside():
    model, x = model_of(dense_layers=0), tokens()
    depths = torch.randint(1, 5, (3, 20), generator=torch.Generator().manual_seed(2))
    stats = model.hidden(model.embed(x), depth=PerToken(depths)).stats
    inside = [int((depths > step).sum()) for step in range(4) for _ in range(2)]
    looped = [seen for block, seen in stats if block in (1, 2)]
    assert [int(seen.load.sum()) for seen in looped] == [2 * count for count in inside]


@pytest.mark.parametrize("mode", ["end", "mask"])
def test_gradients_are_finite_and_recomputation_changes_nothing(mode):
    model, x = model_of(dense_layers=0).double(), tokens()
    found = spread(model, x)
    depth = Exit(found.signal, found.threshold, mode=mode)
    assert depth_of(model, x, depth).unique().numel() > 1
    gradients = []
    for checkpointing in (False, True):
        model.checkpointing = checkpointing
        out = model.loss(x, x, depth=depth)
        out.loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.isfinite().all()
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=1e-12)


@pytest.mark.long
@torch.no_grad()
def test_a_masked_exit_compiles_to_one_graph():
    model, x = model_of(), tokens(2, 12)
    found = spread(model, x)
    depth = Exit(found.signal, found.threshold, mode="mask")

    def call(x):
        hidden = model.hidden(model.embed(x), depth=depth)
        return model.head(hidden.h), hidden.depth[0]

    wanted = call(x)
    assert wanted[1].unique().numel() > 1
    torch._dynamo.reset()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1], wanted[1])
