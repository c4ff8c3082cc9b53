"""Building loops: the registry, the options, and one clear sentence for every mistake."""

import functools

import pytest
import torch
from torch import nn

import looptim as lo
from looptim.training.record import Recorder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "operlop"}, r"unknown preset 'operlop', did you mean 'operloop'\? known: none, vanilla"),
        ({"name": "zzz"}, r"unknown preset 'zzz'; known: none, vanilla"),
        ({"name": "operloop", "stream": 4}, r"operloop has no option 'stream'; its options are streams, objective"),
        ({"name": "vanilla", "streams": 4}, r"vanilla has no option 'streams'; its options are loop_norm"),
        ({"name": "none", "a": 1}, r"none has no option 'a'; it has no options"),
        ({"name": "operloop", "width": 0}, r"width must be a whole number of at least 1, got 0"),
        ({"name": "operloop", "width": 1.5}, r"width must be a whole number of at least 1, got 1.5"),
        ({"name": "operloop", "steps": 0}, r"steps must be a whole number of at least 1, got 0"),
        ({"name": "hyperloop", "streams": 0}, r"streams must be a whole number of at least 1, got 0"),
        (
            {"name": "operloop", "step": "causl"},
            r"unknown step 'causl', did you mean 'causal'\? known: causal, sigmoid",
        ),
        ({"name": "operloop", "objective": "l2"}, r"unknown objective 'l2'; known: delta, inner_product"),
        ({"name": "huginn", "inject": "cat"}, r"unknown inject 'cat'.* known: add, concat"),
        ({"name": "parcae", "gain": 3}, r"unknown gain 3; known: exact, euler"),
        ({"name": "operloop", "shared": "False"}, r"shared of operloop must be true or false, got 'False'"),
        ({"name": "operloop", "read_init": "x"}, r"read_init of operloop must be a number or none, got 'x'"),
        ({"name": "recirculation", "alpha": True}, r"alpha of recirculation must be a number, got True"),
        ({"name": "parcae_aligned", "seed": 0.5}, r"seed of parcae_aligned must be a whole number, got 0.5"),
    ],
)
def test_a_mistake_gets_one_clear_sentence(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        lo.build(**{"width": 8, "steps": 3, **arguments})
    assert "\n" not in str(error.value)


def test_an_input_of_another_width_is_refused():
    loop = lo.build("operloop", width=8, steps=3)
    with pytest.raises(ValueError, match=r"\(batch, tokens, 8\), got \(1, 2, 9\)"):
        loop(torch.randn(1, 2, 9), torch.tanh)
    with pytest.raises(ValueError, match=r"got \(2, 8\)"):
        loop(torch.randn(2, 8), torch.tanh)


def test_blocks_of_another_width_are_refused():
    with pytest.raises(
        ValueError, match=r"blocks gave a tensor of shape \(1, 2, 9\), but the block input is \(1, 2, 8\)"
    ):
        lo.build("operloop", width=8, steps=3)(torch.randn(1, 2, 8), nn.Linear(8, 9))


def test_loops_can_be_made_of_any_transitions():
    def transition():
        return lo.build("operloop", width=8, steps=1).transitions[0]

    loop = lo.Loop([transition(), transition()], width=8, start=lo.state.Copies(4))
    assert loop.steps == 2
    with pytest.raises(ValueError, match="steps is 3, but 2 loop-specific"):
        lo.Loop([transition(), transition()], width=8, steps=3)
    with pytest.raises(ValueError, match="needs `steps`"):
        lo.Loop(transition(), width=8)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        lo.Loop([], width=8)
    with pytest.raises(ValueError, match="width must be at least 1"):
        lo.Loop(transition(), width=0, steps=1)


def test_any_callable_can_be_the_blocks():
    loop, e = lo.build("vanilla", width=8, steps=2), torch.ones(1, 2, 8)
    linear = nn.Linear(8, 8)
    for blocks in (
        linear,
        nn.Sequential(linear),
        torch.tanh,
        lambda o: o,
        functools.partial(torch.add, other=1),
        torch.compile(linear, backend="eager"),
        nn.DataParallel(linear),
    ):
        assert loop(e, blocks).shape == e.shape


def test_the_blocks_may_be_one_callable_per_step():
    loop, e = lo.build("vanilla", width=8, steps=2), torch.ones(1, 2, 8)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    for blocks in ([first, second], (first, second), nn.ModuleList([first, second]), [first, second, first]):
        assert torch.equal(loop(e, blocks), second(first(e)))
    with pytest.raises(ValueError, match="blocks are 1 callables for a loop of 2 steps; give one per step, or one"):
        loop(e, nn.ModuleList([first]))
    with pytest.raises(ValueError, match="blocks must be a callable, or one per step, got NoneType"):
        loop(e, [first, None])


def test_users_add_their_own_presets():
    def mine(width, steps, *, temperature=1.0):
        """My own loop."""
        return lo.build("vanilla", width=width, steps=steps)

    lo.PRESETS["mine"] = mine
    try:
        assert lo.build("mine", width=8, steps=2, temperature=2.0).steps == 2
        with pytest.raises(ValueError, match="mine has no option 'x'; its options are temperature"):
            lo.build("mine", width=8, steps=2, x=1)
    finally:
        del lo.PRESETS["mine"]


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        (lambda width: None, "the preset mine must take a width and a number of steps: too many positional arguments"),
        (
            lambda width, steps, least: None,
            "must take a width and a number of steps: missing a required argument: 'least'",
        ),
        (
            lambda width, steps: lo.presets.vanilla(8, 5),
            "asked for a width of 8 and 3 steps, and returned a loop of width 8 and 5 steps; it must build what it is",
        ),
        (lambda width, steps: lo.presets.vanilla(9, 3), "returned a loop of width 9 and 3 steps"),
    ],
)
def test_a_preset_that_builds_something_else_is_refused(monkeypatch, preset, message):
    monkeypatch.setitem(lo.PRESETS, "mine", preset)
    with pytest.raises(ValueError, match=message):
        lo.build("mine", width=8, steps=3)


def test_register_names_a_loop_after_its_function():
    @lo.register
    def mine_too(width, steps):
        """My own loop.

        More about it.
        """
        return lo.build("vanilla", width=width, steps=steps)

    try:
        loop = lo.build("mine_too", width=8, steps=2)
        assert (loop.name, loop.summary) == ("mine_too", "My own loop.")
    finally:
        del lo.PRESETS["mine_too"]


def test_every_name_of_the_design_is_there():
    for name in ("Transition", "Loop", "build", "PRESETS", "describe", "diagnose", "align", "check_gradient", "trace"):
        assert hasattr(lo, name)
        assert name in dir(lo)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = lo.nonsense


def test_a_start_or_a_read_out_of_another_shape_is_refused():
    transition, e = lo.build("operloop", width=8, steps=1).transitions[0], torch.randn(1, 2, 8)
    with pytest.raises(ValueError, match=r"the read-out gave a tensor of shape \(1, 2, 4, 8\)"):
        lo.Loop([transition], width=8, start=lo.state.Copies(4), readout=lo.state.Linear(8))(e, torch.tanh)
    with pytest.raises(ValueError, match=r"the start is of shape \(1, 2, 8\); .* must be a state \(B, T, r, d\)"):
        lo.Loop([transition], width=8, start=nn.Identity())(e, torch.tanh)


def test_parts_that_do_not_fit_together_say_so():
    parts = lo.build("operloop", width=8, steps=1).transitions[0]
    e = torch.randn(1, 2, 8)
    blind = lo.Transition(parts.projection, parts.objective, parts.rule, features=None)
    with pytest.raises(ValueError, match="a gate looks at the features of the state"):
        lo.Loop([blind], width=8, start=lo.state.Copies(4))(e, torch.tanh)
    gated = lo.rules.GradientDescent(lo.controls.GatedStep(8), lo.controls.ConstantDecay())
    streams = lo.Transition(parts.projection, parts.objective, gated)
    with pytest.raises(ValueError, match="takes a vector state"):
        lo.Loop([streams], width=8, start=lo.state.Copies(4))(e, torch.tanh)


def test_backpropagation_can_be_truncated_to_the_last_steps():
    """The same as detaching the state by hand before them."""
    loop, e = lo.build("huginn", width=8, steps=5).double().eval(), torch.randn(1, 2, 8, dtype=torch.float64)
    blocks = nn.Linear(8, 8).double()
    truncated = loop(e, blocks, grad_steps=2)
    torch.testing.assert_close(truncated, loop(e, blocks))
    with torch.no_grad(), lo.trace(loop) as trace:
        loop(e, blocks)
    y = trace.state[3].squeeze(-2)
    for _ in range(2):
        y = blocks(y + e)
    expected = torch.autograd.grad(y.square().sum(), blocks.weight)
    torch.testing.assert_close(torch.autograd.grad(truncated.square().sum(), blocks.weight), expected)


def test_what_is_not_a_part_is_refused_where_it_is_given():
    parts = lo.projections.Plain(), lo.objectives.Delta(), lo.build("vanilla", width=8, steps=1).transitions[0].rule
    lo.Transition(*parts)
    for place in range(3):
        for wrong in (None, nn.Linear(2, 2), lo.projections.Add):
            given = [*parts]
            given[place] = wrong
            with pytest.raises(ValueError, match=r"must be a looptim (Projection|Objective|Rule), got"):
                lo.Transition(*given)
    with pytest.raises(ValueError, match="step must be a looptim Step, got float"):
        lo.rules.GradientDescent(0.5, 0.1)
    with pytest.raises(ValueError, match="a transition must be a looptim Transition, got Linear"):
        lo.Loop([nn.Linear(2, 2)], width=2)
    for ask in (lo.diagnose, lo.describe, lo.align, lo.check_gradient):
        with pytest.raises(ValueError, match="loop must be a looptim Loop, got str"):
            ask("hyperloop")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, torch.tanh), "takes a tensor of floating point numbers, got NoneType"),
        (
            (torch.zeros(1, 2, 8, dtype=torch.long), torch.tanh),
            "takes a tensor of floating point numbers, got torch.int64",
        ),
        ((torch.zeros(1, 2, 8), None), "blocks must be a callable, or one per step, got NoneType"),
        ((torch.zeros(1, 2, 8), lambda o: (o, None)), "blocks gave a tuple, not a tensor"),
    ],
)
def test_a_bad_call_gets_one_clear_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        lo.build("operloop", width=8, steps=2)(*arguments)


def test_a_loop_may_change_its_rule_from_step_to_step():
    plain, ball = (lo.build(name, width=8, steps=1).transitions[0] for name in ("operloop", "operloop_heavyball"))
    loop = lo.Loop([plain, ball, plain], width=8, start=lo.state.Copies(4))
    assert loop(torch.randn(1, 2, 8), torch.tanh).shape == (1, 2, 8)
    assert lo.check_gradient(loop) < 1e-12
    assert lo.describe(loop).rule_name == "gradient descent | heavy ball"


@pytest.mark.parametrize("preset", ["operloop", "operloop_muon"])
def test_recomputation_keeps_less_and_gives_the_same_gradients(preset):
    loop = lo.build(preset, width=32, steps=3).double()
    loop.set_form("readable")
    e, results = torch.randn(2, 64, 32, dtype=torch.float64, requires_grad=True), []
    for recompute in (False, True):
        with Recorder() as seen:
            h = loop(e, torch.tanh, recompute=recompute)
            kept = seen.live["activations"]
        results.append((kept, h, *torch.autograd.grad(h.square().sum(), [e, *loop.parameters()])))
    (whole, *values), (less, *again) = results
    assert less < 0.7 * whole
    for now, before in zip(again, values, strict=True):
        torch.testing.assert_close(now, before, rtol=1e-10, atol=1e-10)
