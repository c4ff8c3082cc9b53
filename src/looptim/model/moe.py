"""Mixture of experts: sigmoid router, grouped matmul, a shared expert, and balancing without an auxiliary loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.numerics import autocast_dtype, few_without_grad, full_precision
from .exchange import Exchange, Stay
from .grouped import grouped_linear, sum_rows, take_rows

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

INIT_STD = 0.006

FEW_PAIRS = 32
"""Up to this many pairs of token and expert, decoding does not sort them by expert."""
CACHED_NUMEL = 2**20
"""Up to this many elements, a copy of experts' matrices fits the cache and costs less than sorting."""


class Routing(NamedTuple):
    """The experts of each token, their weights, and the scores of all experts."""

    indices: Int[Tensor, "tokens top_k"]
    weights: Float[Tensor, "tokens top_k"]
    scores: Float[Tensor, "tokens experts"]


class MoEStats(NamedTuple):
    """Tokens per expert, and the auxiliary loss without its coefficient, both per sequence."""

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
    """Sigmoid router in fp32 or wider; the biased scores choose the experts, the unbiased ones weigh them.

    s = sigmoid(W x),  K = top-k of s + bias,  weights_i = scaling * s_i / sum_{j in K} s_j for i in K.

    A looped layer may have a matrix per visit, W_l, which all start alike; a visit beyond the last one uses the last.
    With one matrix for all visits a token meets much the same experts in each (LOOM).

    Reference: DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2.

    >>> router = Router(8, experts=4, top_k=2, visits=3)
    >>> router(torch.randn(5, 8), torch.zeros(4), 7).indices.shape
    torch.Size([5, 2])
    """

    def __init__(self, width: int, experts: int, top_k: int, *, scaling: float = 2.5, visits: int = 1) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k must be between 1 and the number of experts, got {top_k} of {experts}.")
        self.num_experts = experts
        self.top_k = top_k
        self.scaling = scaling
        shape = (experts, width) if visits == 1 else (visits, experts, width)
        self.weight = nn.Parameter(torch.empty(shape).normal_(std=INIT_STD))
        self.start_alike()

    @torch.no_grad()
    def start_alike(self) -> None:
        """Give every visit the matrix of the first, so that the model starts as one with a shared router."""
        if self.weight.dim() == 3:
            self.weight[1:] = self.weight[0]

    def forward(
        self, x: Float[Tensor, "tokens width"], bias: Float[Tensor, " experts"], visit: int | Int[Tensor, ""] = 0
    ) -> Routing:
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight if self.weight.dim() == 2 else row_of(self.weight, visit)
        with full_precision(x):
            scores = F.linear(x.to(dtype), weight.to(dtype)).sigmoid()
        indices = (scores.detach() + bias).topk(self.top_k, dim=-1, sorted=False).indices
        chosen = scores.gather(-1, indices)
        if few_without_grad(x):
            shares = [[self.scaling * s / max(sum(row), 1e-20) for s in row] for row in chosen.tolist()]
            return Routing(indices, torch.tensor(shares, dtype=dtype), scores)
        # The floor only matters if every chosen sigmoid underflows, where it avoids 0 / 0.
        weights = self.scaling * chosen / chosen.sum(-1, keepdim=True).clamp_min(1e-20)
        return Routing(indices, weights, scores)


class Experts(nn.Module):
    """The weighted sum over each token's SwiGLU experts, without a loop over experts.

    y_n = sum_{i in K_n} weights_{n,i} down_i(silu(gate_i x_n) * up_i x_n).

    gate, up and down stay separate parameters so that Muon orthogonalizes each expert's matrices separately. If experts
    live on several processes, `exchange` carries the rows there and back.
    """

    def __init__(self, width: int, *, experts: int, hidden: int) -> None:
        super().__init__()
        # Experts are sorted by 16-bit keys.
        if experts >= 2**15:
            raise ValueError(f"experts must be fewer than {2**15}, got {experts}.")
        self.gate = nn.Parameter(torch.empty(experts, hidden, width).normal_(std=INIT_STD))
        self.up = nn.Parameter(torch.empty(experts, hidden, width).normal_(std=INIT_STD))
        self.down = nn.Parameter(torch.empty(experts, width, hidden).normal_(std=INIT_STD))
        self.exchange: Exchange | None = None

    def forward(
        self, x: Float[Tensor, "tokens width"], routing: Routing, live: Bool[Tensor, " tokens"] | None = None
    ) -> Float[Tensor, "tokens width"]:
        """The sum over experts. Tokens that are not `live` meet none, and their results must not be used."""
        dtype = autocast_dtype(x)
        x, weights = x.to(dtype), (self.gate, self.up, self.down)
        if self.exchange is not None:
            # Tokens that are not live travel with the others, since that costs less than asking how many there are.
            own = (self.exchange.own(weight).to(dtype) for weight in weights)
            return experts_by_group(x, routing, *own, exchange=self.exchange)
        weights = tuple(weight.to(dtype) for weight in weights)
        if live is None:
            return experts_form(routing, weights)(x, routing, *weights)
        # The number of live tokens is something a compiler cannot trace and a GPU would have to be waited for.
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return experts_by_group(x, routing, *weights, live=live)
        rows = live.nonzero().flatten()
        if not len(rows):
            return torch.zeros_like(x)
        some = Routing(*(part.index_select(0, rows) for part in routing))
        y = experts_form(some, weights)(x.index_select(0, rows), some, *weights)
        return torch.zeros_like(x).index_copy(0, rows, y)


def experts_form(routing: Routing, weights: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """How to run the experts of these tokens: sorted into groups or, for the few tokens of decoding, unsorted."""
    pairs = routing.indices.numel()
    if pairs > FEW_PAIRS or torch.is_grad_enabled():
        return experts_by_group
    # A compiler cannot trace a list of numbers, and a GPU would have to be waited for.
    if routing.indices.device.type == "cpu" and not torch.compiler.is_compiling():
        return experts_one_by_one
    copied = pairs * sum(weight[0].numel() for weight in weights)
    return experts_by_index if copied <= CACHED_NUMEL else experts_by_group


def experts_by_group(
    x: Tensor,
    routing: Routing,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    live: Tensor | None = None,
    exchange: Exchange | None = None,
) -> Tensor:
    """Sort tokens by expert, so that each expert's matrix meets all of its tokens at once, where the expert lives."""
    top_k = routing.indices.shape[1]
    # An expert index past the end sorts after all others, and its rows are not multiplied.
    chosen = routing.indices if live is None else routing.indices.masked_fill(~live.unsqueeze(-1), len(gate))
    # Short keys sort 3x faster on a CPU when there are many.
    experts, order = chosen.flatten().to(torch.int16).sort(stable=True)
    num_experts = len(gate) if exchange is None else exchange.num_experts
    ids = torch.arange(num_experts, device=x.device, dtype=torch.int16)
    ends = torch.searchsorted(experts, ids, right=True, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    trip = Stay(ends) if exchange is None else exchange.trip(ends)
    gone = None if live is None else (experts == len(gate)).unsqueeze(-1)

    def clean(rows: Tensor) -> Tensor:
        # Rows that are not multiplied are never written either, forward or backward.
        return rows if gone is None else rows.masked_fill(gone, 0)

    rows = trip.there(clean(take_rows(x, order, places, top_k)))
    hidden = F.silu(clean(grouped_linear(rows, gate, trip.ends))) * clean(grouped_linear(rows, up, trip.ends))
    # Weighing the hidden rows equals weighing the outputs, and hidden rows are narrower.
    hidden = hidden * trip.there(routing.weights.flatten().index_select(0, order).unsqueeze(-1).to(x.dtype))
    return sum_rows(trip.back(clean(grouped_linear(hidden, down, trip.ends))), order, places, top_k)


def experts_one_by_one(x: Tensor, routing: Routing, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same with one matrix-vector product per pair; no matrix is copied."""
    chosen = routing.indices.tolist()
    pairs = [(row, expert) for row, experts in zip(x.unbind(), chosen, strict=True) for expert in experts]
    gates, ups = (torch.stack([weight[expert].mv(row) for row, expert in pairs]) for weight in (gate, up))
    hidden, weights = iter((F.silu(gates) * ups).unbind()), routing.weights.tolist()
    rows = []
    for row, experts, shares in zip(x.unbind(), chosen, weights, strict=True):
        y = row
        for place, (expert, share) in enumerate(zip(experts, shares, strict=True)):
            y = torch.addmv(y, down[expert], next(hidden), beta=min(place, 1), alpha=share)
        rows.append(y)
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


def experts_by_index(x: Tensor, routing: Routing, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same with a copy of its experts' matrices per token, so that nothing waits for the routing."""
    tokens, top_k = routing.indices.shape
    chosen = routing.indices.flatten()
    columns = x.unsqueeze(1).expand(-1, top_k, -1).reshape(tokens * top_k, -1, 1)
    hidden = F.silu(gate.index_select(0, chosen) @ columns) * (up.index_select(0, chosen) @ columns)
    hidden = hidden * routing.weights.reshape(-1, 1, 1).to(x.dtype)
    return (down.index_select(0, chosen) @ hidden).view(tokens, top_k, -1).sum(1)


class MoE(nn.Module):
    """Routed experts plus a shared one that is neither gated nor scaled.

    y = experts(x, router(x, bias)) + shared(x). `bias` is a buffer with one row, or one per visit of a looped layer;
    the trainer moves it with `balance_update`. A visit beyond the last row uses the last row; so it is with `routers`,
    matrices of the router for so many visits. Decoding leaves `stats` out.

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
        biases: int = 1,
        routers: int = 1,
    ) -> None:
        super().__init__()
        self.router = Router(width, experts, top_k, scaling=scaling, visits=routers)
        self.experts = Experts(width, experts=experts, hidden=expert_hidden)
        self.shared = SwiGLU(width, shared_hidden)
        self.register_buffer("bias", torch.zeros(biases, experts))

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        visit: int | Int[Tensor, ""] = 0,
        *,
        stats: bool = True,
        live: Bool[Tensor, "batch length"] | None = None,
    ) -> tuple[Float[Tensor, "batch length width"], MoEStats | None]:
        """The output and the stats; tokens that are not `live` meet no routed expert and are not counted."""
        batch, length, _ = x.shape
        flat = x.flatten(0, 1)
        routing = self.router(flat, row_of(self.bias, visit), visit)
        y = self.experts(flat, routing, None if live is None else live.flatten()).view(x.shape) + self.shared(x)
        if not stats:
            return y, None
        counts = expert_counts(routing.indices.view(batch, length, -1), self.router.num_experts, live)
        aux_loss = sequence_balance_loss(routing.scores.view(batch, length, -1), counts, live)
        # Loads are returned, not accumulated, because activation checkpointing runs this call twice and must count it
        # once.
        return y, MoEStats(counts, aux_loss)


def row_of(rows: Float[Tensor, "visits ..."], visit: int | Tensor) -> Tensor:
    """The row of this visit; given as a 0-d tensor, the visit is data and compiled code serves them all."""
    last = rows.shape[0] - 1
    if last == 0:
        return rows[0]
    if isinstance(visit, Tensor):
        return rows.index_select(0, visit.clamp(max=last).reshape(1)).squeeze(0)
    return rows[min(visit, last)]


def expert_counts(
    indices: Int[Tensor, "batch length top_k"], num_experts: int, live: Bool[Tensor, "batch length"] | None = None
) -> Int[Tensor, "batch experts"]:
    """How many live tokens of each sequence chose each expert."""
    ones = torch.ones_like(indices) if live is None else live.unsqueeze(-1).expand_as(indices).to(indices.dtype)
    return indices.new_zeros(indices.shape[0], num_experts).scatter_add(1, indices.flatten(1), ones.flatten(1))


def sequence_balance_loss(
    scores: Float[Tensor, "batch length experts"],
    counts: Int[Tensor, "batch experts"],
    live: Bool[Tensor, "batch length"] | None = None,
) -> Float[Tensor, " batch"]:
    """The balance loss of each sequence over its live tokens, without its coefficient; 1 if balanced.

    L = sum_i f_i P_i,  f_i = E count_i / (k T),  P_i = mean_t s_{t,i} / sum_j s_{t,j}.

    Reference: DeepSeek-AI, "DeepSeek-V3", 2024, equations 17 to 20.
    """
    counts = counts.to(scores.dtype)
    share = scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)
    if live is None:
        fraction, share = counts.shape[-1] * counts / counts.sum(-1, keepdim=True), share.mean(1)
    else:
        inside = live.unsqueeze(-1).to(scores.dtype)
        fraction = counts.shape[-1] * counts / counts.sum(-1, keepdim=True).clamp_min(1)
        share = (share * inside).sum(1) / inside.sum(1).clamp_min(1)
    return (fraction * share).sum(-1)


@torch.no_grad()
def balance_update(
    bias: Float[Tensor, "visits experts"], load: Int[Tensor, "*visits experts"], rate: float = 5e-3
) -> Float[Tensor, "visits experts"]:
    """One step of balancing by bias, given the loads of the global batch: bias + rate * sign(mean(load) - load).

    Reference: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.

    >>> balance_update(torch.zeros(1, 3), torch.tensor([9, 3, 0]), rate=0.5)
    tensor([[-0.5000,  0.5000,  0.5000]])
    """
    # Both sides are multiplied by the number of experts, so the comparison with the mean is exact in integers.
    return bias + rate * torch.sign(load.sum(-1, keepdim=True) - load.shape[-1] * load)
