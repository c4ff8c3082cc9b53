"""Grouped-query causal attention, full or windowed, over a whole sequence or within its documents."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.numerics import few_without_grad, is_plain, unit_rms_of_few, wide
from .norm import RMSNorm
from .rope import apply_rope

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch.nn.attention.flex_attention import BlockMask

Attend = Callable[..., Tensor]
"""The slot of an unrolled layer: what attends with its queries, keys and values.

A slot of a cache is also called with no queries, for a visit that all tokens skip, and only keeps what it is given.
With `rows`, the queries are those of these sequences alone, of all that there are keys of.
"""

HAS_TRITON = importlib.util.find_spec("triton") is not None


def causal_attention(
    q: Float[Tensor, "batch heads length dim"],
    k: Float[Tensor, "batch kv_heads length dim"],
    v: Float[Tensor, "batch kv_heads length dim"],
    *,
    window: int | None = None,
    starts: Int[Tensor, "batch length"] | None = None,
    rows: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch heads length dim"]:
    """Causal softmax attention; with a window the cost grows with length * window, with documents document by document.

    y_i = sum_j softmax_j(q_i . k_j / sqrt(dim)) v_j over all j <= i, of which a window leaves i - window < j, and
    documents leave starts_i <= j (see `document_starts`). With `rows` the queries are those of these sequences alone.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> torch.equal(causal_attention(x, x, x, window=1), x)
    True
    """
    if window is not None and window < 1:
        raise ValueError(
            f"window is the number of keys a query sees, including its own; got {window}, give at least 1 or None."
        )
    if rows is not None:
        k, v, starts = k[rows], v[rows], None if starts is None else starts[rows]
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"got {q.shape[2]} queries and {k.shape[2]} keys: with a cache, attend through the cache's slot."
        )
    if window is not None and window >= q.shape[2]:
        window = None
    if window is None and starts is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # The kernels of FlexAttention need head widths of at least 16.
    if q.is_cuda and HAS_TRITON and q.dtype != torch.float64 and q.shape[-1] >= 16:
        return flex_masked_attention(q, k, v, window=window, starts=starts)
    if starts is not None:
        return attention_by_document(q, k, v, window=window, starts=starts)
    assert window is not None
    return blocked_window_attention(q, k, v, window)


def cached_attention(
    q: Float[Tensor, "batch heads new dim"],
    k: Float[Tensor, "batch kv_heads length dim"],
    v: Float[Tensor, "batch kv_heads length dim"],
    *,
    window: int | None = None,
) -> Float[Tensor, "batch heads new dim"]:
    """The same for queries of the last tokens only, with the keys of those before; a window leaves the others out.

    >>> x = torch.randn(1, 2, 5, 4)
    >>> y = cached_attention(x[:, :, 3:], x, x, window=2)
    >>> torch.allclose(y, causal_attention(x, x, x, window=2)[:, :, 3:], atol=1e-6)
    True
    """
    new = q.shape[2]
    if new == k.shape[2]:
        return causal_attention(q, k, v, window=window)
    if window is not None and window + new - 1 < k.shape[2]:
        k, v = k[:, :, 1 - window - new :], v[:, :, 1 - window - new :]
    seen = None
    if new > 1:
        key = torch.arange(k.shape[2], device=q.device)
        query = key[-new:].unsqueeze(1)
        seen = key <= query if window is None else (key <= query) & (key > query - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def document_starts(documents: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    """The start of each token's document, for ids that change where a new document begins.

    >>> document_starts(torch.tensor([[7, 7, 3, 3, 3, 4]]))
    tensor([[0, 0, 2, 2, 2, 5]])
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return (places * begins).cummax(1).values


def document_lengths(starts: Int[Tensor, "batch length"]) -> list[int]:
    """The lengths of all documents, row by row.

    >>> document_lengths(torch.tensor([[0, 0, 2, 2, 2], [0, 0, 0, 0, 4]]))
    [2, 3, 4, 1]
    """
    first = starts == torch.arange(starts.shape[1], device=starts.device)
    ends = [*first.flatten().nonzero().flatten().tolist(), first.numel()]
    return [end - start for start, end in itertools.pairwise(ends)]


# A compiler would generate new code for every set of lengths.
@torch.compiler.disable
def attention_by_document(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, starts: Tensor) -> Tensor:
    """Attention within each document, one after another, so that nothing a mask would hide is computed."""
    lengths = document_lengths(starts)
    parts = zip(*(t.transpose(1, 2).flatten(0, 1).split(lengths) for t in (q, k, v)), strict=True)
    y = [causal_attention(*(t.transpose(0, 1).unsqueeze(0) for t in part), window=window) for part in parts]
    return torch.cat(y, dim=2).squeeze(0).unflatten(1, (len(q), -1)).transpose(0, 1)


def blocked_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The first `window` queries are plainly causal; the rest go in blocks of c, each against window + c keys."""
    batch, _, length, _ = q.shape
    first = F.scaled_dot_product_attention(
        q[:, :, :window], k[:, :, :window], v[:, :, :window], is_causal=True, enable_gqa=True
    )
    # Smaller blocks compute fewer scores that the mask discards, larger ones suit the kernel. On a CPU this stays
    # within 10% of the best of 8 to 128 rows, for windows of 32 to 512.
    block = min(max(window // 4, 32), length - window)
    num_blocks = -(-(length - window) // block)
    padding = num_blocks * block - (length - window)
    if padding:
        q, k, v = (F.pad(t, (0, 0, 0, padding)) for t in (q, k, v))
    queries = q[:, :, window:].unflatten(2, (num_blocks, block)).transpose(1, 2).flatten(0, 1)
    keys, values = (t.unfold(2, window + block, block).permute(0, 2, 1, 4, 3).flatten(0, 1) for t in (k, v))
    row = torch.arange(block, device=q.device).unsqueeze(1)
    offset = torch.arange(window + block, device=q.device) - window
    band = (offset <= row) & (offset > row - window)
    rest = F.scaled_dot_product_attention(queries, keys, values, attn_mask=band, enable_gqa=True)
    rest = rest.unflatten(0, (batch, num_blocks)).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, rest[:, :, : length - window]], dim=2)


def flex_masked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, starts: Tensor | None = None
) -> Tensor:
    """The same through FlexAttention, whose backward pass exists on GPUs only."""
    from torch.nn.attention.flex_attention import flex_attention

    # A compiler traces through caches, so it gets the functions themselves.
    compiling = torch.compiler.is_compiling()
    attend = flex_attention if compiling else compiled_flex_attention()
    if starts is not None or not is_plain(q):
        mask = block_mask(q.shape[2], window, q.device, starts)
    else:
        mask = cached_block_mask(q.shape[2], window, q.device)
    y = attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    assert isinstance(y, Tensor)
    return y


@functools.lru_cache(maxsize=1)
def compiled_flex_attention() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def visible(window: int | None = None, starts: Int[Tensor, "batch length"] | None = None) -> Callable[..., Tensor]:
    """The keys that a query sees, as a mask function of FlexAttention; several masks compose by `and`."""
    from torch.nn.attention.flex_attention import and_masks

    masks: list[Callable[..., Tensor]] = [lambda batch, head, query, key: key <= query]
    if window is not None:
        masks.append(lambda batch, head, query, key: key > query - window)
    if starts is not None:
        masks.append(lambda batch, head, query, key: key >= starts[batch, query])
    return and_masks(*masks)


def block_mask(length: int, window: int | None, device: torch.device, starts: Tensor | None = None) -> BlockMask:
    """The blocks of scores that FlexAttention computes."""
    from torch.nn.attention.flex_attention import create_block_mask

    if starts is None:
        return create_block_mask(visible(window), None, None, length, length, device=device)
    # Uncompiled, the mask function would fill a tensor of batch * length * length.
    alone = not torch.compiler.is_compiling()
    return create_block_mask(visible(window, starts), len(starts), None, length, length, device=device, _compile=alone)


@functools.lru_cache(maxsize=64)
def cached_block_mask(length: int, window: int | None, device: torch.device) -> BlockMask:
    # A mask first made under inference_mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        return block_mask(length, window, device)


class Attention(nn.Module):
    """Grouped-query attention: projections, per-head norm of q and k, RoPE; `attend` does the rest.

    y = o(attend(rope(norm(q(x))), rope(norm(k(x))), v(x))).

    Reference: Ainslie et al., "GQA", 2023; for the norm of q and k, Dehghani et al., "Scaling Vision Transformers to 22
    Billion Parameters", 2023.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qk_norm: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}: each KV head serves equally many."
            )
        self.head_dim = head_dim
        self.q = nn.Linear(width, heads * head_dim, bias=False)
        self.k = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None

    def forward(
        self, x: Float[Tensor, "batch length width"], attend: Attend, rope: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "batch length width"]:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if few_without_grad(x):
            # For so little work each call costs more than it computes, so queries and keys share one norm and one
            # rotation.
            both = self._norm_together(torch.cat([q, k], dim=-2), q.shape[-2])
            q, k = apply_rope(both.transpose(1, 2), *rope).split([q.shape[-2], k.shape[-2]], dim=1)
        else:
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = (apply_rope(t.transpose(1, 2), *rope) for t in (q, k))
        y = attend(q, k, v.transpose(1, 2))
        return self.o(y.transpose(1, 2).flatten(2))

    def _norm_together(self, both: Float[Tensor, "batch length heads dim"], heads: int) -> Tensor:
        """Normalize the first `heads` heads as queries and the rest as keys, if the model has these norms."""
        if self.q_norm is None or self.k_norm is None:
            return both
        gains = [self.q_norm.gain.expand(heads, -1), self.k_norm.gain.expand(both.shape[-2] - heads, -1)]
        normed = unit_rms_of_few(wide(both), self.q_norm.eps)
        return torch.addcmul(normed, normed, torch.cat(gains).to(normed.dtype)).to(both.dtype)
