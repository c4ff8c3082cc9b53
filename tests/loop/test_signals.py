"""Signals against their equations, and exits of a bare loop."""

import itertools
import math

import pytest
import torch

import looptim as lo
from looptim.loop.depth import Exit, Fixed, PerToken, parse_depth
from looptim.loop.signals import SIGNALS, Gate, Random

HEADLESS = ("residual", "change", "acceleration")


def loop_and_input(name="operloop", steps=5, batch=3, **options):
    torch.manual_seed(0)
    loop = lo.build(name, width=8, steps=steps, **options).double().eval()
    scales = torch.linspace(0.1, 3, 7, dtype=torch.float64).reshape(1, -1, 1)
    return loop, torch.randn(batch, 7, 8, dtype=torch.float64) * scales


def blocks(o):
    return o + 0.3 * torch.tanh(o.roll(1, -1))


def values_of(name, loop, e):
    """A signal's value after every step but the last, written out from a trace of the whole loop."""
    with lo.trace(loop) as seen:
        loop(e, blocks)
    states = [Y.flatten(2) for Y in seen.state]
    if name == "residual":
        pairs = list(zip(seen.read, seen.target, strict=True))
        if isinstance(loop.transitions[0].objective, lo.objectives.Delta):
            return torch.stack([(t - o).norm(dim=-1) / t.norm(dim=-1) for o, t in pairs])
        return torch.stack([1 - (t * o).sum(-1) / (t.norm(dim=-1) * o.norm(dim=-1)) for o, t in pairs])
    if name == "change":
        return torch.stack([(b - a).norm(dim=-1) / b.norm(dim=-1) for a, b in itertools.pairwise(states)])
    moves = [b - a for a, b in itertools.pairwise(states)]
    bends = [torch.full(e.shape[:2], 1e300, dtype=e.dtype)]
    for before, after, Y in zip(moves, moves[1:], states[2:], strict=False):
        bends.append((after - before).norm(dim=-1) / Y.norm(dim=-1))
    return torch.stack([bends[0], *[torch.maximum(a, b) for a, b in itertools.pairwise(bends)]])


@pytest.mark.parametrize("preset", ["operloop", "vanilla", "operloop_heavyball"])
@pytest.mark.parametrize("name", HEADLESS)
def test_a_token_leaves_after_the_first_step_whose_signal_is_small(name, preset):
    loop, e = loop_and_input(preset)
    values = values_of(name, loop, e)
    # These blocks let no token see another, so that what the whole loop did tells when each would leave.
    usable = values[values < 1e200]
    threshold = usable.median().item()
    for minimum in (1, 3):
        small = values[:-1] < threshold
        small[: minimum - 1] = False
        wanted = 1 + (small.cumsum(0) == 0).sum(0)
        with lo.trace(loop) as whole:
            loop(e, blocks)
        for mode in ("end", "mask"):
            h, state = loop(e, blocks, depth=Exit(name, threshold, minimum, mode=mode), return_state=True)
            assert wanted.unique().numel() > 1 and torch.equal(state.depth, wanted)
            frozen = torch.stack(whole.state).gather(0, wanted[None, ..., None, None].expand(1, *state.Y.shape))[0]
            torch.testing.assert_close(state.Y, frozen, rtol=0, atol=1e-12)
            torch.testing.assert_close(h, loop.readout(frozen), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(lo.PRESETS.keys() - {"none"}))
def test_no_threshold_is_the_whole_loop_and_an_infinite_one_is_one_step(name):
    loop = lo.build(name, width=8, steps=3).eval()
    e = torch.randn(2, 5, 8)
    if any(getattr(part, "mixes_tokens", False) for part in loop.modules()):
        with pytest.raises(ValueError, match="reads the state of the token before"):
            loop(e, torch.tanh, depth=Exit("residual", 0.1))
        return
    for signal in HEADLESS:
        assert torch.equal(loop(e, torch.tanh, depth=Exit(signal, 0.0)), loop(e, torch.tanh))
        assert torch.equal(loop(e, torch.tanh, depth=Exit(signal, 0.0, mode="mask")), loop(e, torch.tanh))
        h, state = loop(e, torch.tanh, depth=Exit(signal, math.inf), return_state=True)
        assert (state.depth == 1).all() and len(state.live) == 1
        first = lo.Loop([loop.transitions[0]], width=8, start=loop.start, readout=loop.readout).eval()
        assert torch.equal(h, first(e, torch.tanh))


@pytest.mark.parametrize("patience", [1, 2, 9])
def test_with_patience_a_token_leaves_some_steps_later(patience):
    loop, e = loop_and_input()
    threshold = values_of("residual", loop, e)[:3].median().item()
    at_once = loop(e, blocks, depth=Exit("residual", threshold), return_state=True)[1].depth
    for mode in ("end", "mask", "compact"):
        later = Exit("residual", threshold, patience=patience, mode=mode)
        state = loop(e, blocks, depth=later, return_state=True)[1]
        assert torch.equal(state.depth, (at_once + patience).clamp(max=5))
        replayed = loop(e, blocks, depth=PerToken(state.depth), return_state=True)[1]
        torch.testing.assert_close(state.Y, replayed.Y, rtol=0, atol=1e-13)


def test_a_ragged_batch_is_each_row_alone_and_replays():
    loop, e = loop_and_input("operloop_nesterov")
    depth = Exit("change", values_of("change", loop, e).median().item())
    together, state = loop(e, blocks, depth=depth, return_state=True)
    for row in range(3):
        alone, its = loop(e[row : row + 1], blocks, depth=depth, return_state=True)
        assert torch.equal(its.depth[0], state.depth[row])
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-13)
    again, replayed = loop(e, blocks, depth=PerToken(state.depth), return_state=True)
    assert torch.equal(again, together) and torch.equal(replayed.depth, state.depth)


def test_a_shared_transition_goes_on_and_a_loop_specific_one_repeats_its_last_only_if_told():
    loop, e = loop_and_input("operloop", shared=True)
    assert torch.equal(loop(e, blocks, depth=Exit("residual", 0.0, maximum=9)), loop(e, blocks, depth=Fixed(9)))
    loop, e = loop_and_input("operloop", steps=3)
    with pytest.raises(ValueError, match="loop-specific parameters for 3 steps, and maximum is 5; lower it, or let"):
        loop(e, blocks, depth=Exit("residual", 0.0, maximum=5))
    longer = lo.Loop(
        [*loop.transitions, loop.transitions[2], loop.transitions[2]],
        width=8,
        start=loop.start,
        readout=loop.readout,
    )
    repeated = Exit("residual", 0.0, maximum=5, repeat_last=True)
    assert torch.equal(loop(e, blocks, depth=repeated), longer(e, blocks))
    shorter = loop(e, blocks, depth=Exit("residual", 0.0, maximum=2))
    assert torch.equal(shorter, loop(e, blocks, depth=PerToken(torch.full((3, 7), 2))))


def test_a_prompt_takes_every_step():
    loop, e = loop_and_input()
    h, state = loop(e, blocks, depth=Exit("change", math.inf, prompt=4), return_state=True)
    assert state.depth.tolist() == [[5] * 4 + [1] * 3] * 3
    torch.testing.assert_close(h[:, :4], loop(e, blocks)[:, :4])
    assert Exit("change", 1.0, prompt=4).part(3, 2).prompt == 1


def test_a_control_leaves_with_the_shares_it_is_given():
    loop, e = lo.build("vanilla", width=2, steps=4), torch.randn(50, 200, 2)
    shares = [0.5, 0.0, 0.3, 0.2]
    torch.manual_seed(0)
    _, state = loop(e, torch.tanh, depth=Exit(Random(shares), 1.0), return_state=True)
    found = torch.bincount(state.depth.flatten(), minlength=5)[1:] / 10_000
    # Three standard errors of a share of 10,000 tokens.
    assert (found - torch.tensor(shares)).abs().max() < 0.015


def test_a_gate_lets_out_by_the_probability_of_being_inside():
    loop, e = loop_and_input()
    gate = Gate(8).double()
    torch.nn.init.normal_(gate.linear.weight)
    with lo.trace(loop) as whole:
        loop(e, blocks)
    inside, wanted = torch.ones(3, 7, dtype=e.dtype), torch.full((3, 7), 5)
    for step, Y in enumerate(whole.state[1:5], 1):
        h = Y.mean(-2)
        h = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        inside = inside * (1 - torch.sigmoid(h @ gate.linear.weight[0] + gate.linear.bias))
        wanted = torch.where((inside < 0.4) & (wanted == 5), step, wanted)
    _, state = loop(e, blocks, depth=Exit(gate, 0.4), return_state=True)
    assert wanted.unique().numel() > 1 and torch.equal(state.depth, wanted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Exit("residue", 0.1), "unknown signal 'residue', did you mean 'residual'"),
        (lambda: Exit("residual", math.nan), "threshold must be a number of at least 0, got nan"),
        (lambda: Exit("residual", "0.1"), "threshold must be a number of at least 0, got '0.1'"),
        (lambda: Exit("residual", 0.1, minimum=3, maximum=2), "minimum .3. must not exceed maximum .2."),
        (lambda: Exit("residual", 0.1, minimum=0), "minimum must be a whole number of at least 1, got 0"),
        (lambda: Exit("residual", 0.1, mode="fast"), "unknown mode 'fast'"),
        (lambda: Exit("residual", 0.1, prompt=-1), "prompt must be a whole number of tokens, got -1"),
        (lambda: Exit("residual", 0.1, patience=0.5), "patience must be a whole number of steps, got 0.5"),
        (lambda: parse_depth("residual+soon:0.1"), "depth 'residual.soon:0.1' does not parse"),
        (lambda: parse_depth("residual:0.1:1:8:again"), "depth 'residual:0.1:1:8:again' does not parse"),
        (lambda: parse_depth("residual:0.1:0"), "minimum must be a whole number of at least 1, got 0"),
        (lambda: parse_depth("residual+-1:0.1"), "patience must be a whole number of steps, got -1"),
        (lambda: run(Exit("kl", 0.1)), "the signal kl looks at predictions, which take a model's head"),
        (lambda: run(Exit("residual", 0.1, minimum=9)), "minimum .9. must not exceed the 5 steps of operloop"),
        (lambda: run(Exit("residual", 0.1), grad_steps=1), "grad_steps keeps the gradient of the last steps"),
        (lambda: run(PerToken(torch.full((3, 7), 6))), "counts asks for 6 steps, but operloop runs 5"),
        (lambda: run(PerToken(torch.full((3, 6), 2))), "counts has 6 tokens, but the input has 7"),
        (lambda: run(Exit(Gate(9), 0.1)), "the gate has a width of 9, but the model 8"),
        (lambda: run(Exit(Saying(lambda g: (g.norm(), None)), 0.1)), r"saying gave a tensor of shape .*, .3, 7., and"),
        (lambda: run(Exit(Saying(lambda g: g.norm(dim=-1)), 0.1)), r"one number per token, .3, 7., and its memory"),
        (lambda: run(Exit(Saying(lambda g: (1.0, None)), 0.1)), "the signal saying gave a float; forward must return"),
        (lambda: parse_depth("0"), "steps must be a whole number of at least 1, got 0"),
        (lambda: PerToken([[0, 1]]), "counts must be whole numbers of at least 1, one per token"),
        (lambda: parse_depth("residual:soon"), "depth 'residual:soon' does not parse; give a number of loops, or"),
        (lambda: parse_depth("residual"), "depth 'residual' does not parse"),
        (lambda: Random([]), "shares must be those of depths"),
    ],
)
def test_bad_exits_are_one_sentence(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


class Saying(lo.Signal):
    def __init__(self, says):
        super().__init__()
        self.says = says

    def forward(self, seen, memory):
        return self.says(seen.record.g)


def run(depth, **options):
    loop, e = loop_and_input()
    return loop(e, blocks, depth=depth, **options)


def test_an_exit_is_written_on_a_command_line():
    depth = parse_depth("kl:1e-3:2:8")
    assert (depth.signal.name, depth.threshold, depth.minimum, depth.maximum) == ("kl", 1e-3, 2, 8)
    assert str(depth) == "kl < 0.001, minimum 2, maximum 8, prefill with exits"
    assert str(Exit("kl", 0.1, prompt=9)).endswith(", the first 9 tokens at full depth")
    assert parse_depth("change+2:0.1").patience == 2
    assert parse_depth("change:0.1:1:8:repeat").repeat_last and not parse_depth("change:0.1:1:8").repeat_last
    assert str(parse_depth("change+2:0.1")).startswith("change < 0.1, 2 more, minimum 1")
    predicting = {"kl", "entropy", "margin"}
    assert set(SIGNALS) == {"residual", "change", "acceleration"} | predicting | {f"{name}_coda" for name in predicting}


@pytest.mark.long
def test_a_masked_exit_compiles_to_one_graph():
    loop, e = loop_and_input()
    depth = Exit("acceleration", 0.3, mode="mask")

    def call(e):
        h, state = loop(e, blocks, depth=depth, return_state=True)
        return h, state.depth

    torch._dynamo.reset()
    for got, wanted in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(e), call(e), strict=True):
        torch.testing.assert_close(got, wanted)
