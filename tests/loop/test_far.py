"""Leaks are found that are there in long sequences, at the borders of chunks, in deep loops or in generation only."""

import pytest
import torch
import torch.nn.functional as F
from leaking import STREAMS, WIDTH, Start, loop_with, next_token

import looptim as lo
from looptim.loop.far import find_leak_at


def positions(e, chosen):
    return chosen(torch.arange(e.shape[1])).to(e.dtype).view(1, -1, 1)


def border_of_chunks(e):
    """The last token of each chunk of 64 sees the first of the next."""
    return e + positions(e, lambda place: place % 64 == 63) * next_token(e)


def border_of_odd_chunks(e):
    return e + positions(e, lambda place: place % 24 == 23) * next_token(e)


def mean_of_chunk(e):
    whole = e.shape[1] // 64 * 64
    chunks = e[:, :whole].unflatten(1, (-1, 64)) if whole else e.new_zeros(len(e), 0, 64, e.shape[-1])
    return e + F.pad((0 * chunks + chunks.mean(2, keepdim=True)).flatten(1, 2), (0, 0, 0, e.shape[1] - whole))


def where_tokens_repeat(e):
    """Random tokens never do, those of a text often."""
    same = F.pad((e[:, 1:] == e[:, :-1]).all(-1, keepdim=True), (0, 0, 1, 0))
    return e + same.to(e.dtype) * next_token(e)


def where_tokens_are_zero(e):
    return e + (e == 0).all(-1, keepdim=True).to(e.dtype) * next_token(e)


def in_inference_mode(e):
    return next_token(e) if torch.is_inference_mode_enabled() else e


def second_sequence_after(e):
    return e + 0.1 * e.roll(2, 0) if e.shape[1] > 100 else e


def last_sequence_first(e):
    return e + 0.1 * e.flip(0) if e.shape[1] > 100 else e


LEAKS = [border_of_chunks, border_of_odd_chunks, mean_of_chunk, where_tokens_repeat, where_tokens_are_zero]
LEAKS += [in_inference_mode, second_sequence_after, last_sequence_first]


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_a_leak_is_found_and_its_part_is_named(leak):
    what = "other sequences" if leak in (second_sequence_after, last_sequence_first) else "later tokens"
    with pytest.raises(ValueError, match=f"^mine sees {what}.*: among .* the start gives"):
        lo.check_causality(loop_with(start=Start(leak)))


class When(lo.Part):
    def __init__(self, condition):
        super().__init__()
        self.condition = condition

    def forward(self, e):
        return lo.state.Copies(STREAMS)(next_token(e) if self.condition(self.training, e) else e)


def graded():
    return torch.is_grad_enabled()


CONDITIONS = {
    "64 sequences of 256 tokens outside of training,": lambda training, e: not training and e.shape[1] > 64,
    "in a sequence of 256 tokens the start": lambda training, e: training and len(e) == 1,
    "in a sequence of 256 tokens outside of training,": lambda training, e: (
        not training and len(e) == 1 and e.shape[1] > 64
    ),
    "3 sequences of 1000 tokens": lambda training, e: 300 < e.shape[1] < 2000,
    "100 sequences of 20 tokens": lambda training, e: len(e) == 100,
    "24 sequences of 40 tokens the start": lambda training, e: 9 < e.shape[1] < 63 and len(e) < 64,
    "after frozen layers,": lambda training, e: training and graded() and not e.requires_grad,
    "in training mode without gradients,": lambda training, e: training and not graded(),
    "outside of training, with gradients,": lambda training, e: not training and e.requires_grad,
    "outside of training, with gradients, after frozen layers,": lambda training, e: (
        not training and graded() and not e.requires_grad
    ),
    "40 tokens outside of training,": lambda training, e: (
        not (training or graded() or torch.is_inference_mode_enabled()) and e.shape[1] > 8
    ),
    "under autocast,": lambda training, e: torch.is_autocast_enabled("cpu"),
    "in bf16,": lambda training, e: e.dtype == torch.bfloat16,
    "outside of training, in fp16,": lambda training, e: e.dtype == torch.float16,
}


@pytest.mark.parametrize("where", CONDITIONS)
def test_a_leak_is_found_that_is_there_in_one_shape_or_way_only(where):
    with pytest.raises(ValueError, match=f"^mine sees later tokens: .*{where}"):
        lo.check_causality(loop_with(start=When(CONDITIONS[where])))


def test_a_leak_between_very_large_tokens_is_found():
    with pytest.raises(ValueError, match=r"^mine sees later tokens"):
        lo.check_causality(loop_with(start=Start(lambda e: e + (e.abs() > 3000).to(e.dtype) * next_token(e))))


def test_a_part_may_have_a_longest_sequence():
    table = torch.randn(300, WIDTH)
    assert lo.check_causality(loop_with(start=Start(lambda e: e + table.to(e)[: e.shape[1]]))) < 1e-9
    with pytest.raises(ValueError, match=r"^mine does not run on 2 sequences of 500 tokens \(The size of tensor"):
        find_leak_at(loop_with(start=Start(lambda e: e + table.to(e)[: e.shape[1]])), 2, 500)


class Late(lo.Direction):
    """Sees the future from the sixth step on."""

    def init(self, Y):
        return 0

    def forward(self, G, memory):
        return (next_token(G) if memory >= 5 else G), memory + 1


def test_a_leak_in_more_steps_than_the_loop_has_is_found():
    loop = loop_with(rule=lambda step, decay: lo.rules.Descent(step, decay, Late()))
    with pytest.raises(ValueError, match=r"^mine sees later tokens: .* the direction Late gives"):
        lo.check_causality(loop)


def test_a_convolution_with_the_past_is_allowed():
    def convolved(e):
        size = 2 * e.shape[1]
        kernel = 0.9 ** torch.arange(e.shape[1], dtype=e.dtype).unsqueeze(-1)
        return torch.fft.irfft(torch.fft.rfft(e, size, 1) * torch.fft.rfft(kernel, size, 0), size, 1)[:, : e.shape[1]]

    assert lo.check_causality(loop_with(start=Start(convolved))) < 1e-9


def test_what_grows_beyond_all_numbers_is_no_leak():
    assert find_leak_at(loop_with(start=Start(lambda e: e * 1e30 * 1e30)), 4, 8) is None


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (3, 5), (64, 256)])
def test_any_shape_is_run(shape):
    assert find_leak_at(lo.build("operloop", width=WIDTH, steps=2), *shape) is None
    assert "sees later tokens" in find_leak_at(loop_with(start=Start(next_token)), *shape)
