"""Multiplying rows by the matrix of their expert: one operator for a whole layer of experts, and its derivative."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# This is our own operator around grouped_mm because torch 2.13 traces grouped_mm in bf16 only, so fp32 neither compiles
# nor runs on the meta device. It also does not count FLOPs and supports neither float64 nor unaligned widths.


def take_rows(x: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
    """y[i] = x[order[i] // top_k]: a copy of each token's row for each of its experts, sorted by expert.

    `places` is the inverse of the permutation `order`.
    """
    y = TakeRows.apply(x, order, places, top_k)
    assert isinstance(y, Tensor)
    return y


def sum_rows(y: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
    """x[n] = sum_j y[places[n top_k + j]], the adjoint of `take_rows`: each token's rows, added in a fixed order.

    The sums use the inverse permutation, since scatter-adding would use atomics on a GPU, which add in a different
    order every time.
    """
    x = SumRows.apply(y, order, places, top_k)
    assert isinstance(x, Tensor)
    return x


class TakeRows(torch.autograd.Function):
    """`take_rows`, with `sum_rows` as its derivative."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
        return x.index_select(0, order // top_k)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, order, places, ctx.top_k = inputs
        ctx.save_for_backward(order, places)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple:
        return sum_rows(grads[0], *ctx.saved_tensors, ctx.top_k), None, None, None


class SumRows(torch.autograd.Function):
    """`sum_rows`, with `take_rows` as its derivative."""

    @staticmethod
    def forward(y: Tensor, order: Tensor, places: Tensor, top_k: int) -> Tensor:
        if torch.compiler.is_compiling():
            return y.index_select(0, places).unflatten(0, (-1, top_k)).sum(1)
        # This does the same in one pass.
        return F.embedding_bag(places.view(-1, top_k), y, mode="sum")

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, order, places, ctx.top_k = inputs
        ctx.save_for_backward(order, places)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple:
        return take_rows(grads[0], *ctx.saved_tensors, ctx.top_k), None, None, None


@torch.library.custom_op("looptim::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """y[a:b] = x[a:b] @ weight[e].T for the rows a = ends[e-1] to b = ends[e] of each expert."""
    if waits_for_ends(x):
        return blocked_linear(x, weight, ends)
    if fits_grouped_mm(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, rows in enumerate(row_slices(ends)):
        y[rows] = x[rows] @ weight[expert].T
    return y


@torch.library.custom_op("looptim::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """w[e] = left[a:b].T @ right[a:b], the gradient of `grouped_linear` with respect to its weight."""
    if waits_for_ends(left):
        return blocked_outer(left, right, ends)
    if fits_grouped_mm(left, right):
        return F.grouped_mm(left.T, right, offs=ends)
    return torch.stack([left[rows].T @ right[rows] for rows in row_slices(ends)])


def fits_grouped_mm(left: Tensor, right: Tensor) -> bool:
    """Whether grouped_mm accepts these operands: no float64, and rows aligned to 16 bytes."""
    widths = (left.shape[-1], right.shape[-1], right.shape[-2] if right.ndim == 3 else 0)
    aligned = all(width * left.element_size() % 16 == 0 for width in widths)
    return aligned and left.dtype != torch.float64 and left.numel() > 0


def waits_for_ends(x: Tensor) -> bool:
    """Whether only blocks avoid copying `ends` to the host; from SM90 on, grouped_mm is one kernel for bf16."""
    return x.is_cuda and (x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (9, 0))


BLOCK = 64
"""Rows of one expert to multiply at once if their number must not be read from the device."""


def blocks_of(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Put rows, sorted by expert, into blocks of one expert: rows' places, blocks' experts, blocks per expert.

    There are as many blocks as any choice of experts could need, so their number is known without looking. Unused
    blocks are empty and count for the last expert.

    >>> places, experts, numbers = blocks_of(torch.tensor([2, 2, 3]), rows=3)
    >>> places.tolist(), experts.tolist(), numbers.tolist()
    ([0, 1, 64], [0, 2, 2], [1, 0, 2])
    """
    total = rows // BLOCK + len(ends)
    starts = F.pad(ends[:-1], (1, 0))
    numbers = (ends - starts + BLOCK - 1) // BLOCK
    last = numbers.cumsum(0)
    row = torch.arange(rows, device=ends.device)
    # Rows after the last expert's belong to tokens that are not live; they count for the last expert too.
    owner = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    places = ((last - numbers) * BLOCK - starts)[owner] + row
    block = torch.arange(total, device=ends.device)
    experts = torch.searchsorted(last, block, right=True).clamp(max=len(ends) - 1)
    return places, experts, torch.cat([numbers[:-1], (total - last[-1] + numbers[-1]).unsqueeze(0)])


def in_blocks(x: Tensor, places: Tensor, blocks: int) -> Tensor:
    """The rows at their places in the blocks, with zeros elsewhere."""
    return x.new_zeros(blocks * BLOCK, x.shape[1]).index_copy(0, places, x).unflatten(0, (blocks, BLOCK))


def blocked_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` without waiting: a batched matmul of blocks with copies of their experts' matrices."""
    places, experts, _ = blocks_of(ends, len(x))
    y = in_blocks(x, places, len(experts)) @ weight.index_select(0, experts).mT
    return y.flatten(0, 1).index_select(0, places)


def blocked_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`grouped_outer` without waiting; blocks are added in a fixed order."""
    places, experts, numbers = blocks_of(ends, len(left))
    products = in_blocks(left, places, len(experts)).mT @ in_blocks(right, places, len(experts))
    return torch.segment_reduce(products, "sum", lengths=numbers, unsafe=True)


def row_slices(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def grouped_linear_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    # grouped_mm rejects the stride of 0 of an expanded gradient.
    grad = grad.contiguous()
    return grouped_linear(grad, weight.transpose(1, 2), ends), grouped_outer(grad, x, ends), None


def grouped_outer_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    left, right, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return grouped_linear(right, grad, ends), grouped_linear(left, grad.transpose(1, 2), ends), None


grouped_linear.register_autograd(grouped_linear_backward, setup_context=save_inputs)
grouped_outer.register_autograd(grouped_outer_backward, setup_context=save_inputs)


@register_flop_formula([torch.ops.looptim.grouped_linear, torch.ops.looptim.grouped_outer])
def grouped_flops(left_shape, right_shape, *args, **kwargs) -> int:
    """Each row of the left operand meets one matrix of the right one: 2 rows * (in * out) in both directions."""
    rows, width = left_shape
    other = right_shape[1]
    return 2 * rows * width * other
