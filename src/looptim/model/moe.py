"""Mixture of experts: sigmoid router, grouped matmul, a shared expert, balance without an auxiliary loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from ..base.numerics import autocast_dtype, full_precision

if TYPE_CHECKING:
    from jaxtyping import Float, Int

INIT_STD = 0.006


class Routing(NamedTuple):
    """Which experts each token goes to, with what weight, and every expert's score."""

    indices: Int[Tensor, "tokens top_k"]
    weights: Float[Tensor, "tokens top_k"]
    scores: Float[Tensor, "tokens experts"]


class MoEStats(NamedTuple):
    """Tokens per expert, and the auxiliary loss before its coefficient: of each sequence in this call."""

    load: Int[Tensor, "batch experts"]
    aux_loss: Float[Tensor, " batch"]


class SwiGLU(nn.Module):
    """y = down(silu(gate x) * up x).

    Reference: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Router(nn.Module):
    """Sigmoid router in fp32 or wider: the bias chooses the experts, the unbiased scores weigh them.

    s = sigmoid(W x),  K = top-k of s + bias,  weights_i = scaling * s_i / sum_{j in K} s_j for i in K.

    Reference: DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2.
    """

    def __init__(self, width: int, experts: int, top_k: int, *, scaling: float = 2.5) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k must be between 1 and the number of experts, got {top_k} of {experts}.")
        self.num_experts = experts
        self.top_k = top_k
        self.scaling = scaling
        self.weight = nn.Parameter(torch.empty(experts, width).normal_(std=INIT_STD))

    def forward(self, x: Float[Tensor, "tokens width"], bias: Float[Tensor, " experts"]) -> Routing:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with full_precision(x):
            scores = F.linear(x.to(dtype), self.weight.to(dtype)).sigmoid()
        indices = (scores.detach() + bias).topk(self.top_k, dim=-1, sorted=False).indices
        chosen = scores.gather(-1, indices)
        # The floor acts only where every chosen sigmoid underflows, and then avoids 0 / 0.
        weights = self.scaling * chosen / chosen.sum(-1, keepdim=True).clamp_min(1e-20)
        return Routing(indices, weights, scores)


class Experts(nn.Module):
    """The weighted sum over each token's SwiGLU experts, without a loop over experts.

    y_n = sum_{i in K_n} weights_{n,i} down_i(silu(gate_i x_n) * up_i x_n).

    gate, up and down stay separate parameters so that Muon orthogonalizes each expert's matrices one by one.
    """

    def __init__(self, width: int, *, experts: int, hidden: int) -> None:
        super().__init__()
        # They are sorted by 16-bit keys.
        if experts >= 2**15:
            raise ValueError(f"experts must be fewer than {2**15}, got {experts}.")
        self.gate = nn.Parameter(torch.empty(experts, hidden, width).normal_(std=INIT_STD))
        self.up = nn.Parameter(torch.empty(experts, hidden, width).normal_(std=INIT_STD))
        self.down = nn.Parameter(torch.empty(experts, width, hidden).normal_(std=INIT_STD))

    def forward(self, x: Float[Tensor, "tokens width"], routing: Routing) -> Float[Tensor, "tokens width"]:
        num_experts, top_k = self.gate.shape[0], routing.indices.shape[1]
        # Many short keys sort 3x faster on a CPU; a stable sort makes the order of the sums reproducible there.
        experts, order = routing.indices.flatten().to(torch.int16).sort(stable=True)
        ids = torch.arange(num_experts, device=x.device, dtype=torch.int16)
        ends = torch.searchsorted(experts, ids, right=True, out_int32=True)
        tokens = order // top_k
        dtype = autocast_dtype(x)
        gate, up, down = (weight.to(dtype) for weight in (self.gate, self.up, self.down))
        rows = x.to(dtype).index_select(0, tokens)
        hidden = F.silu(grouped_linear(rows, gate, ends)) * grouped_linear(rows, up, ends)
        # Weighing the hidden rows equals weighing the outputs, and they are narrower.
        hidden = hidden * routing.weights.flatten().index_select(0, order).unsqueeze(-1).to(dtype)
        outputs = grouped_linear(hidden, down, ends)
        return torch.zeros_like(x, dtype=dtype).index_add(0, tokens, outputs)


class MoE(nn.Module):
    """Routed experts plus a shared one that is neither gated nor scaled.

    y = experts(x, router(x, bias)) + shared(x). `bias` is a buffer with one row, or one per visit of a looped layer;
    the trainer moves it with `balance_update`. A visit beyond the last row uses the last row.

    >>> moe = MoE(8, experts=4, top_k=2, expert_hidden=4, shared_hidden=4)
    >>> y, stats = moe(torch.randn(2, 3, 8))
    >>> y.shape, stats.load.sum().item()
    (torch.Size([2, 3, 8]), 12)
    """

    bias: Tensor

    def __init__(
        self,
        width: int,
        *,
        experts: int,
        top_k: int,
        expert_hidden: int,
        shared_hidden: int,
        scaling: float = 2.5,
        visits: int = 1,
    ) -> None:
        super().__init__()
        self.router = Router(width, experts, top_k, scaling=scaling)
        self.experts = Experts(width, experts=experts, hidden=expert_hidden)
        self.shared = SwiGLU(width, shared_hidden)
        self.register_buffer("bias", torch.zeros(visits, experts))

    def forward(
        self, x: Float[Tensor, "batch length width"], visit: int | Int[Tensor, ""] = 0
    ) -> tuple[Float[Tensor, "batch length width"], MoEStats]:
        batch, length, _ = x.shape
        flat = x.flatten(0, 1)
        routing = self.router(flat, visit_row(self.bias, visit))
        y = self.experts(flat, routing).view(x.shape) + self.shared(x)
        counts = expert_counts(routing.indices.view(batch, -1), self.router.num_experts)
        aux_loss = sequence_balance_loss(routing.scores.view(batch, length, -1), counts)
        # Returned, not accumulated: recomputing this call under activation checkpointing must not count it again.
        return y, MoEStats(counts, aux_loss)


def visit_row(bias: Float[Tensor, "visits experts"], visit: int | Tensor) -> Float[Tensor, " experts"]:
    """The row of this visit; given as a 0-d tensor, the visit is data and compiled code serves them all."""
    last = bias.shape[0] - 1
    if last == 0:
        return bias[0]
    if isinstance(visit, Tensor):
        return bias.index_select(0, visit.clamp(max=last).reshape(1)).squeeze(0)
    return bias[min(visit, last)]


def expert_counts(indices: Int[Tensor, "batch slots"], num_experts: int) -> Int[Tensor, "batch experts"]:
    """How many slots of each sequence chose each expert."""
    return indices.new_zeros(indices.shape[0], num_experts).scatter_add(1, indices, torch.ones_like(indices))


def sequence_balance_loss(
    scores: Float[Tensor, "batch length experts"], counts: Int[Tensor, "batch experts"]
) -> Float[Tensor, " batch"]:
    """The balance loss of each sequence, without its coefficient; 1 when balanced.

    L = sum_i f_i P_i,  f_i = E count_i / (k T),  P_i = mean_t s_{t,i} / sum_j s_{t,j}.

    Reference: DeepSeek-AI, "DeepSeek-V3", 2024, equations 17 to 20.
    """
    counts = counts.to(scores.dtype)
    fraction = counts.shape[-1] * counts / counts.sum(-1, keepdim=True)
    share = (scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)).mean(1)
    return (fraction * share).sum(-1)


@torch.no_grad()
def balance_update(
    bias: Float[Tensor, "visits experts"], load: Int[Tensor, "*visits experts"], rate: float = 5e-3
) -> Float[Tensor, "visits experts"]:
    """One step of balancing by bias, over the loads of the global batch: bias + rate * sign(mean(load) - load).

    Reference: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.

    >>> balance_update(torch.zeros(1, 3), torch.tensor([9, 3, 0]), rate=0.5)
    tensor([[-0.5000,  0.5000,  0.5000]])
    """
    # Scaled by the number of experts the comparison with the mean is exact in integers.
    return bias + rate * torch.sign(load.sum(-1, keepdim=True) - load.shape[-1] * load)


# An operator of our own around grouped_mm: torch 2.13 traces grouped_mm in bf16 only, so that fp32 neither compiles
# nor runs on the meta device, it does not count its FLOPs, and it has neither float64 nor unaligned widths.


@torch.library.custom_op("looptim::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """y[a:b] = x[a:b] @ weight[e].T for the rows a = ends[e-1] to b = ends[e] of each expert."""
    if fits_grouped_mm(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, rows in enumerate(row_slices(ends)):
        y[rows] = x[rows] @ weight[expert].T
    return y


@torch.library.custom_op("looptim::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """w[e] = left[a:b].T @ right[a:b], the gradient of `grouped_linear` in its weight."""
    if fits_grouped_mm(left, right):
        return F.grouped_mm(left.T, right, offs=ends)
    return torch.stack([left[rows].T @ right[rows] for rows in row_slices(ends)])


def fits_grouped_mm(left: Tensor, right: Tensor) -> bool:
    """Whether grouped_mm takes these operands: no float64, rows of whole 16 bytes."""
    widths = (left.shape[-1], right.shape[-1], right.shape[-2] if right.ndim == 3 else 0)
    aligned = all(width * left.element_size() % 16 == 0 for width in widths)
    return aligned and left.dtype != torch.float64 and left.numel() > 0


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
    # grouped_mm refuses the stride 0 of an expanded gradient.
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
    """Each row of the left operand meets one matrix of the right: 2 rows * (in * out) either way."""
    rows, width = left_shape
    other = right_shape[1]
    return 2 * rows * width * other
