"""How deep a loop goes: today's depths against a plain copy of the loop before there were policies, and new ones."""

import pytest
import torch
from torch import nn

import looptim as lo
from looptim.loop.depth import Fixed, PerSequence

SHARED = {
    "vanilla": {},
    "huginn": {},
    "parcae": {},
    "recurrentgpt": {},
    "recirculation": {},
    "operloop": {"shared": True},
    "hyperloop": {"shared": True},
    "operloop_heavyball": {"shared": True},
    "operloop_nesterov": {"shared": True},
    "operloop_muon": {"shared": True},
    "operloop_hyperball": {"shared": True},
}


def reference(loop, e, blocks, *, counts=None, total=None, steps=None, grad_steps=None):
    """The loop as it was when a number of steps or one per sequence were arguments of its own."""
    length = steps or (loop.steps if counts is None else max(int(counts.max()), total or 0))
    transitions = list(loop.transitions) * length if loop.shared else list(loop.transitions)
    Y = loop.start(e)
    carry = transitions[0].rule.init(Y)
    for index, transition in enumerate(transitions):
        before, old = Y, carry
        with torch.set_grad_enabled(grad_steps is None or index >= length - grad_steps):
            Y, carry = transition(Y, e, blocks, carry)
        if counts is not None:
            begun = (counts >= length - index).reshape(-1, 1, 1, 1)
            Y = torch.where(begun, Y, before)
            if isinstance(carry.eta, torch.Tensor):
                carry = carry._replace(eta=torch.where(begun, carry.eta, old.eta))
            if carry.memory is not None:
                pairs = zip(carry.memory, old.memory, strict=True)
                memory = tuple(None if new is None else torch.where(begun, new, was) for new, was in pairs)
                carry = carry._replace(memory=memory)
    return loop.readout(Y)


def assert_same_with_gradients(loop, e, blocks, call, twin):
    results = []
    for run in (call, twin):
        torch.manual_seed(1)
        out = run()
        inputs = [e, *blocks.parameters(), *loop.parameters()]
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)])
    for got, wanted in zip(*results, strict=True):
        assert (got is None and wanted is None) or torch.equal(got, wanted)


@pytest.mark.parametrize("grad_steps", [None, 2])
@pytest.mark.parametrize("name", SHARED)
def test_todays_depths_are_what_they_were_to_the_last_bit(name, grad_steps):
    loop, blocks = lo.build(name, width=8, steps=3, **SHARED[name]), nn.Linear(8, 8)
    e, counts = torch.randn(3, 2, 8, requires_grad=True), torch.tensor([2, 4, 1])
    for depth, arguments in [
        (None, {}),
        (Fixed(5), {"steps": 5}),
        (PerSequence(counts), {"counts": counts}),
        (PerSequence(counts, total=6), {"counts": counts, "total": 6}),
    ]:
        assert_same_with_gradients(
            loop,
            e,
            blocks,
            lambda depth=depth: loop(e, blocks, depth=depth, grad_steps=grad_steps),
            lambda arguments=arguments: reference(loop, e, blocks, grad_steps=grad_steps, **arguments),
        )


def test_loop_specific_transitions_run_the_steps_they_were_built_for():
    loop, e = lo.build("operloop", width=8, steps=3), torch.randn(2, 2, 8)
    assert torch.equal(loop(e, torch.tanh, depth=Fixed(3)), loop(e, torch.tanh))
    with pytest.raises(
        ValueError, match="loop-specific parameters for 3 steps and cannot run 5; build it with steps=5"
    ):
        loop(e, torch.tanh, depth=Fixed(5))
    with pytest.raises(ValueError, match="loop-specific parameters and cannot run a number of steps per sequence"):
        loop(e, torch.tanh, depth=PerSequence([2, 3]))


@pytest.mark.parametrize("steps", [0, -1, True, 2.0, "2"])
def test_a_number_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got"):
        Fixed(steps)


@pytest.mark.parametrize("counts", [[0, 2], [1.5, 2.0], [], [[1, 2]], [True, True], 2])
def test_numbers_of_steps_that_are_none_are_refused(counts):
    with pytest.raises(ValueError, match="counts must be whole numbers of at least 1, one per sequence, got"):
        PerSequence(torch.tensor(counts))


def test_what_is_no_depth_or_does_not_fit_the_batch_is_refused():
    loop, e = lo.build("vanilla", width=8, steps=3), torch.randn(2, 2, 8)
    with pytest.raises(ValueError, match="counts has 3 numbers of steps, but the batch has 2 sequences"):
        loop(e, torch.tanh, depth=PerSequence([1, 2, 3]))
    with pytest.raises(ValueError, match="depth must be a looptim Depth, got int"):
        loop(e, torch.tanh, depth=3)


@pytest.mark.parametrize("name", ["vanilla", "huginn", "parcae", "operloop"])
def test_shared_transitions_run_any_number_of_steps(name):
    loop, e = lo.build(name, width=8, steps=3, **SHARED[name]).eval(), torch.randn(1, 2, 8)
    longer = lo.build(name, width=8, steps=7, **SHARED[name]).eval()
    longer.load_state_dict(loop.state_dict())
    assert torch.equal(loop(e, torch.tanh, depth=Fixed(7)), longer(e, torch.tanh))


class Remembering(lo.Rule):
    """A user's rule with all kinds of memory: the mean of the gradients so far, and a decay of its own."""

    def init(self, Y):
        memory = {"sum": 0 * Y, "more": (0, [0 * Y[:, :, 0, 0], 0.5])}
        return super().init(Y)._replace(memory=memory)

    def forward(self, Y, G, ctx, carry):
        count, (first, fading) = carry.memory["more"]
        G_sum, count, first = carry.memory["sum"] + G, count + 1, first + G[:, :, 0, 0]
        eta, lam = self.step(ctx, carry.eta), self.decay(ctx) * fading + 0.1 * carry.lam
        Y = Y - eta * (lam * Y + G_sum / count + 0.1 * first[..., None, None])
        return Y, lo.Carry(eta, lam, {"sum": G_sum, "more": (count, [first, 0.9 * fading])})


class Fading(lo.controls.Step):
    def forward(self, ctx, previous):
        return 0.7 * previous


def user_loop(rule):
    return lo.Loop(lo.Transition(lo.projections.Add(), lo.objectives.Delta(), rule), width=8, steps=3).double()


def assert_each_as_alone(loop, blocks):
    e = torch.randn(3, 2, 8, dtype=torch.float64)
    together = loop(e, blocks, depth=PerSequence([2, 5, 1]))
    torch.testing.assert_close(loop(e, blocks, depth=PerSequence([2, 5, 1], total=9)), together)
    for row, steps in enumerate([2, 5, 1]):
        alone = loop(e[row : row + 1], blocks, depth=Fixed(steps))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", SHARED)
def test_each_sequence_loops_as_if_it_were_alone(name):
    assert_each_as_alone(lo.build(name, width=8, steps=3, **SHARED[name]).double().eval(), torch.tanh)


def test_a_memory_may_be_any_tree_of_tensors_and_numbers():
    assert_each_as_alone(user_loop(Remembering(Fading(), lo.controls.ConstantDecay(0.3))), torch.tanh)


def test_a_memory_that_cannot_wait_is_refused():
    class Late(lo.Rule):
        """Makes its memory in the first step, when others have not begun yet."""

        def forward(self, Y, G, ctx, carry):
            M = G if carry.memory is None else 0.5 * carry.memory + G
            return Y - 0.1 * M, lo.Carry(1.0, 0.0, self.shaped(M))

        def shaped(self, M):
            return M

    class Flat(Late):
        def init(self, Y):
            return super().init(Y)._replace(memory=0 * Y.flatten(0, 1))

        def shaped(self, M):
            return M.flatten(0, 1)

        def forward(self, Y, G, ctx, carry):
            return super().forward(Y, G, ctx, carry._replace(memory=carry.memory.view(Y.shape)))

    parts = lo.controls.ConstantStep(), lo.controls.ConstantDecay()
    for rule in (Late, Flat):
        loop, e = user_loop(rule(*parts)), torch.randn(3, 2, 8, dtype=torch.float64)
        assert loop(e, torch.tanh).shape == e.shape
        with pytest.raises(ValueError, match=f"the memory of {rule.__name__} cannot wait for a sequence"):
            loop(e, torch.tanh, depth=PerSequence([1, 3, 2]))


def test_a_decay_that_is_a_matrix_waits_too():
    class Mixing(lo.Decay):
        def forward(self, ctx):
            return lo.controls.StreamMatrix(torch.full((1, 1), 0.2, dtype=torch.float64))

    loop = user_loop(lo.rules.GradientDescent(lo.controls.ConstantStep(0.5), Mixing()))
    assert_each_as_alone(loop, torch.tanh)
    with lo.trace(loop) as trace:
        loop(torch.randn(2, 2, 8, dtype=torch.float64), torch.tanh, depth=PerSequence([1, 2]))
    assert trace.decay[0].flatten().tolist() == [0.0, 0.2]


def test_a_sequence_that_waits_is_traced_where_it_waits():
    loop, e = lo.build("operloop", width=8, steps=3, shared=True), torch.randn(2, 2, 8)
    with lo.trace(loop) as trace:
        loop(e, torch.tanh, depth=PerSequence([1, 3]))
    for before, after in zip(trace.state[:2], trace.state[1:3], strict=True):
        assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
    for H, state, read in zip(trace.input_map, trace.state, trace.read, strict=False):
        torch.testing.assert_close(H.read(state), read)


class Leave(lo.Depth):
    """An exit per token: it leaves when its local objective is small, and never returns."""

    needs_record = True

    def __init__(self, threshold):
        self.threshold = threshold

    def count_steps(self, loop, batch):
        return loop.steps

    def live(self, step, total, last, record):
        if record is None:
            return True
        here = last & (record.o - record.t).norm(dim=-1).gt(self.threshold)
        return here if here.any() else False


@pytest.mark.parametrize("name", ["operloop", "operloop_heavyball", "mixed"])
def test_an_exit_per_token_is_only_another_depth(name):
    """Loop-specific transitions included, also where only some of them have a memory."""
    if name == "mixed":
        parts = [lo.build(each, width=8, steps=1).transitions[0] for each in ("operloop", "operloop_heavyball")]
        loop = lo.Loop([*parts, *parts], width=8, start=lo.state.Copies(4)).double()
    else:
        loop = lo.build(name, width=8, steps=4).double()
    e = torch.randn(2, 6, 8, dtype=torch.float64) * torch.linspace(0.1, 2, 6, dtype=torch.float64).reshape(1, -1, 1)
    with lo.trace(loop) as trace:
        loop(e, torch.tanh)
    errors = torch.stack([(o - t).norm(dim=-1) for o, t in zip(trace.read, trace.target, strict=True)])
    # It lies between two of the errors: which side of it they are on does not hang on rounding.
    threshold = errors[:3].flatten().sort().values[len(errors) * 4 : len(errors) * 4 + 2].mean().item()
    # Tokens do not meet here, so that one which leaves is where the whole loop had it then.
    stays = (errors[:3] > threshold).cumprod(0).sum(0) + 1
    h, state = loop(e, torch.tanh, depth=Leave(threshold), return_state=True)
    assert state.depth.unique().numel() > 2 and torch.equal(state.depth, stays)
    for row in range(2):
        for token in range(6):
            left = trace.state[state.depth[row, token]][row, token]
            torch.testing.assert_close(state.Y[row, token], left)
    torch.testing.assert_close(h, state.Y.mean(-2))
    assert len(loop(e, torch.tanh, depth=Leave(1e9), return_state=True)[1].live) == 1


def test_a_loop_starts_from_a_given_state_and_returns_its_last():
    loop, e = lo.build("huginn", width=8, steps=3), torch.randn(2, 5, 8)
    Y = torch.randn(2, 5, 1, 8)
    first, state = loop(e, torch.tanh, start=Y, depth=Fixed(2), return_state=True)
    assert torch.equal(state.Y.squeeze(-2), first)
    assert state.depth.dtype == torch.int64 and torch.equal(state.depth, torch.full((2, 5), 2))
    again = loop(e, torch.tanh, start=state.Y, depth=Fixed(1))
    assert torch.equal(again, loop(e, torch.tanh, start=Y))
    waited = loop(e, torch.tanh, depth=PerSequence([1, 3]), return_state=True)[1]
    assert waited.depth.tolist() == [[1] * 5, [3] * 5]
    momentum = lo.build("operloop_heavyball", width=8, steps=3)
    carry = momentum(e, torch.tanh, return_state=True)[1].carry
    assert carry.eta.shape == (2, 5, 1, 1)
    with pytest.raises(ValueError, match=r"the start is of shape \(2, 5, 8\); for an input .* \(B, T, r, d\)"):
        loop(e, torch.tanh, start=e)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, o, step=None):
        assert step is None
        return o + self.inner(o)


@pytest.mark.long
@pytest.mark.parametrize("name", ["operloop", "operloop_nesterov", "parcae"])
def test_a_call_compiles_without_a_graph_break(name):
    loop = lo.build(name, width=8, steps=3, **SHARED[name]).eval()
    stacks, e = [Stack() for _ in range(4)], torch.randn(2, 5, 8)

    def decode(e, counts):
        first = loop(e, stacks[0])
        h, state = loop(first, stacks, depth=Fixed(4), start=loop.start(e), return_state=True)
        return loop(h, lambda o: stacks[1](o), depth=counts, start=state.Y), state.depth

    for counts in (PerSequence([2, 4]), None):
        torch._dynamo.reset()
        got = torch.compile(decode, fullgraph=True, backend="aot_eager")(e, counts)
        for here, there in zip(got, decode(e, counts), strict=True):
            torch.testing.assert_close(here, there)


@pytest.mark.parametrize("preset", ["operloop", "operloop_nesterov", "huginn", "parcae"])
def test_a_loop_goes_on_from_a_state_as_if_it_had_not_stopped(preset):
    options = {"shared": True} if preset.startswith("operloop") else {}
    loop = lo.build(preset, width=8, steps=5, **options).eval()
    e, blocks = torch.randn(2, 3, 8), [lambda o, s=s: torch.tanh(s * o) for s in range(1, 6)]
    whole, last = loop(e, blocks, return_state=True)
    _, state = loop(e, blocks, depth=lo.depth.Fixed(2), return_state=True)
    on, after = loop(e, blocks, start=state, return_state=True)
    assert torch.equal(on, whole)
    assert torch.equal(after.depth, last.depth)
    for depth in (lo.depth.Fixed(1), lo.depth.Exit()):
        with pytest.raises(ValueError, match="a state after 2 steps goes on to a fixed depth of at least as many"):
            loop(e, blocks, start=state, depth=depth)
