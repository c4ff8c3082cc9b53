"""States rebuilt in the backward against states that were kept."""

import pytest
import torch

import looptim as lo
from looptim.loop import reversible
from looptim.loop.depth import PerSequence
from looptim.loop.reversible import Chain, irreversible_part
from looptim.model import LoopedLM

WIDTH = 16
CASES = ["hyperloop", "operloop", "operloop_inner", "operloop_sigmoid"]
OPTIONS = {"operloop_inner": {"objective": "inner_product"}, "operloop_sigmoid": {"step": "sigmoid"}}


def make(case, steps, dtype):
    """A loop whose gates depend on the state."""
    torch.manual_seed(0)
    loop = lo.build(case.split("_")[0], width=WIDTH, steps=steps, **OPTIONS.get(case, {})).to(dtype)
    for parameter in loop.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return loop


def gradients(loop, dtype, **options):
    torch.manual_seed(1)
    blocks = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).to(dtype)
    e = torch.randn(3, 7, WIDTH, dtype=dtype, requires_grad=True)
    h = loop(e, blocks, **options)
    learned = [e, *blocks.parameters(), *loop.parameters()]
    return [h, *torch.autograd.grad(h.square().sum(), learned, materialize_grads=True)]


def assert_close(got, expected, tolerance):
    assert torch.equal(got[0], expected[0])
    for g, x in zip(got, expected, strict=True):
        torch.testing.assert_close(g, x, rtol=tolerance, atol=tolerance * max(1, x.abs().max().item()))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_loop_that_keeps_its_states(case, steps, dtype, tolerance):
    loop = make(case, steps, dtype)
    expected = gradients(loop, dtype)
    loop.reverse()
    assert_close(gradients(loop, dtype), expected, tolerance)
    if steps > 1:
        assert_close(
            gradients(loop, dtype, grad_steps=2), gradients(make(case, steps, dtype), dtype, grad_steps=2), tolerance
        )


def test_sequences_of_different_depths_are_right():
    depth = PerSequence(torch.tensor([1, 4, 2]))
    loop = lo.build("operloop", width=WIDTH, steps=4, shared=True).double()
    expected = gradients(loop, torch.float64, depth=depth)
    loop.reverse()
    assert_close(gradients(loop, torch.float64, depth=depth), expected, 1e-10)


def rebuild(states, gates):
    """The chain of a loop over random states whose gates are given, and the states it gives back, last first."""
    chain, Y = Chain(states[0]), states[0]
    truth = [Y]
    for k in gates:
        g, w = torch.randn(*Y.shape[:2], Y.shape[3]), torch.rand(Y.shape[:3])
        Y_next = k.unsqueeze(-1) * Y - w.unsqueeze(-1) * g.unsqueeze(-2)
        chain.append(Y, Y_next, g, k, w)
        Y = Y_next
        truth.append(Y)
    return chain, truth[:-1], [chain.state(step) for step in reversed(range(len(gates)))][::-1]


@pytest.mark.parametrize("lowest", [0.98, 0.1, 1e-3, 0.0])
def test_what_the_bound_lets_through_is_within_it(lowest):
    torch.manual_seed(0)
    gates = [lowest + (1 - lowest) * torch.rand(4, 32, 4) ** 2 for _ in range(24)]
    if lowest == 0:
        gates = [torch.where(torch.rand_like(k) < 0.1, 0.0, k) for k in gates]
    chain, truth, found = rebuild([torch.randn(4, 32, 4, 8)], gates)
    for Y, rebuilt in zip(truth, found, strict=True):
        error = (Y - rebuilt).abs().amax(-1) / Y.abs().amax((-2, -1)).unsqueeze(-1)
        assert error.max() <= reversible.TOLERANCE
    kept = torch.stack([step.kept for step in chain.written]).float().mean()
    assert kept < 0.02 if lowest == 0.98 else 0 < kept < 0.5


def test_without_the_bound_states_would_be_wrong(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(reversible, "TOLERANCE", float("inf"))
    _, truth, found = rebuild([torch.randn(4, 32, 4, 8)], [0.1 + 0.2 * torch.rand(4, 32, 4) for _ in range(24)])
    assert (truth[0] - found[0]).abs().max() > 1


def test_a_backward_that_comes_twice_gives_the_same():
    loop = make("operloop", 6, torch.float32)
    loop.reverse()
    e = torch.randn(2, 5, WIDTH, requires_grad=True)
    h = loop(e, torch.tanh).sum()
    first, second = (torch.autograd.grad(h, e, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_last_state_that_was_changed_is_noticed():
    loop = make("operloop", 6, torch.float32)
    loop.reverse()
    h, state = loop(torch.randn(2, 5, WIDTH, requires_grad=True), torch.tanh, return_state=True)
    state.Y.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        h.sum().backward()


@pytest.mark.parametrize("preset", list(lo.PRESETS))
def test_what_cannot_be_reversed_is_refused_by_its_part(preset):
    loop = lo.build(preset, width=WIDTH, steps=3)
    part = next(filter(None, map(irreversible_part, loop.transitions)), None)
    if part is None:
        assert preset.startswith(("hyperloop", "operloop"))
        loop.reverse()
    else:
        with pytest.raises(ValueError, match=f"{preset} cannot rebuild its states, because of {part}"):
            loop.reverse()


def test_a_model_with_experts_and_recomputed_blocks_learns_the_same():
    config = lo.ModelConfig.tiny(layout="1-2x4-1", loop={"preset": "operloop"}, experts=4, top_k=2)
    tokens = torch.randint(config.vocab_size, (2, 16))
    found = []
    for saving in (False, True):
        model = LoopedLM(config, seed=0)
        if saving:
            model.reverse_loops()
            model.checkpointing = True
        model.loss(tokens, tokens).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)
