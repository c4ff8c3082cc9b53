"""The looped language model. `LoopedLM.hidden` reads like Algorithm 1 of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import ModelConfig
from ..loop import Depth, Loop
from ..loop.depth import Fixed
from ..loop.loop import LoopState
from .alone import is_alone, knows, run_block
from .attention import Attend
from .block import Block
from .build import build_block, build_loop, derive, draw_seed, seeded
from .embedding import build_embedding
from .head import IGNORE, Head
from .layout import Layout
from .moe import MoEStats, Router
from .norm import RMSNorm
from .visits import HeldKeys, Reading, Visit, make_visits, of_the_live

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Hidden(NamedTuple):
    """What the body computes for a sequence."""

    h: Float[Tensor, "B T d"]
    """The normalized output of the coda."""
    stats: list[tuple[int, MoEStats]]
    """(block, stats) for every visit of a MoE layer."""
    depth: tuple[Int[Tensor, "B T"], ...]
    """How many steps each token took in each loop."""
    early: tuple[Float[Tensor, "B T d"], ...] = ()
    """The coda's normalized output if the loop had ended after each number of steps in the depth's `reads`."""


class Output(NamedTuple):
    """What a training step needs from a forward pass."""

    loss: Float[Tensor, ""]
    """The supervised loss plus the weighted auxiliary loss."""
    cross_entropy: Float[Tensor, ""]
    """The loss of the predictions alone."""
    supervised: Float[Tensor, ""]
    """The cross entropy, plus the weighted one of earlier read-outs if there are any."""
    loads: dict[str, Int[Tensor, "visits experts"]]
    """Tokens per expert, by name of the MoE layer, one row per visit; router biases are balanced with them."""


class LoopedBody(nn.Module):
    """Embedding, prelude, loop, coda, norm: any transition on any layout (Section 2, Appendices B and C)."""

    def __init__(
        self, config: ModelConfig, *, seed: int | None = None, place: Callable[[Block, int], None] | None = None
    ):
        """`seed` fixes every initial weight; without it, a seed is drawn from torch's global generator.

        `place` is called with each block and its index as soon as the block has its weights, before the next one is
        built. It may move or shard the block, for models too large for any single device.
        """
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise ValueError(
                f"{type(self).__name__} takes a ModelConfig (the `model` of a recipe), got {type(config).__name__}"
            )
        seed = draw_seed() if seed is None else seed
        self.config = config
        # Transitions are built first, so that a wrong preset or option is found before anything large is allocated.
        self.loops = nn.ModuleList(
            seeded(seed, f"loops.{i}", lambda s=segment: build_loop(config, s.loops))
            for i, segment in enumerate(s for s in config.segments if s.loops is not None)
        )
        self.embedding = build_embedding(config)
        self.blocks = nn.ModuleList()
        layout = Layout.of(config)
        for index, (layer, visits) in enumerate(zip(layout.blocks, layout.visits, strict=True)):
            block = build_block(config, layer, visits)
            self._init_weights(f"blocks.{index}", block, seed)
            self.blocks.append(block)
            if place is not None:
                place(block, index)
        last = [segment for segment in config.segments if segment.blocks][-1]
        ends_normed = last.loops is not None and cast(Loop, self.loops[-1]).normed
        self.norm = nn.Identity() if ends_normed else RMSNorm(config.width, config.norm_eps)
        self._init_weights("embedding", self.embedding, seed)
        self.checkpointing = False

    def _init_weights(self, name: str, part: nn.Module, seed: int) -> None:
        """Draw normal weights of `init_std`, each from its own generator, seeded by the seed and the weight's name.

        Models that share a part therefore start with equal weights in it, whatever their transition or depth.
        """
        std = self.config.init_std
        if part is self.embedding and self.config.embedding_std is not None:
            std = self.config.embedding_std
        for full_name, parameter in part.named_parameters(name):
            if parameter.dim() > 1 and not parameter.is_meta:
                generator = torch.Generator(parameter.device).manual_seed(derive(seed, full_name))
                nn.init.normal_(parameter, std=std, generator=generator)
        for router in (module for module in part.modules() if isinstance(module, Router)):
            router.start_alike()

    def embed(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T d"]:
        """Embed tokens; a token outside the vocabulary, or a sequence that is too long, is an error and not a crash."""
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
            given = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ValueError(f"tokens must be a tensor of whole numbers, got {given}")
        if tokens.dim() != 2 or not tokens.numel():
            raise ValueError(f"tokens must have the shape (batch, length) with at least one, got {tuple(tokens.shape)}")
        if tokens.shape[1] > self.config.max_length:
            raise ValueError(f"the sequence has {tokens.shape[1]} tokens, but max_length is {self.config.max_length}")
        self.check_vocabulary(tokens // self.config.vocab_size if self.config.pairs else tokens)
        return self.embedding(tokens.long())

    def check_vocabulary(self, tokens: Int[Tensor, "B T"]) -> None:
        """Raise a ValueError for a token that is not in the vocabulary."""
        # On a GPU the check would wait for the device; torch's own assertion has to do there.
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and tokens.numel():
            low, high = map(int, tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                bad = low if low < 0 else high
                raise ValueError(f"token {bad} is out of range: the vocabulary has {self.config.vocab_size}")

    def check_documents(self) -> None:
        """Raise a ValueError if documents that share a sequence cannot be kept apart."""
        if self.mixes_tokens:
            raise ValueError(
                f"{self.config.loop.preset} reads the state of the token before, which may be of another document; set "
                "data.mask_attention=false (or give no documents), or choose a transition without token_shift"
            )

    @property
    def mixes_tokens(self) -> bool:
        """Whether a token reads the previous token's state in a transition, and not only through attention."""
        return any(getattr(module, "mixes_tokens", False) for module in self.loops.modules())

    def hidden(
        self,
        h: Float[Tensor, "B T d"],
        *,
        positions: Int[Tensor, "*B T"] | None = None,
        attend: Sequence[Attend] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        depth: Depth | None = None,
        grad_loops: int | None = None,
        stats: bool = True,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Hidden:
        """The coda's normalized output for embeddings `h`, plus what the experts and loops report.

        The stats leave out a sequence that waits for its first loop, since its visit has no effect. `stats=False` skips
        them altogether.

        `attend` has one slot per unrolled layer, in order: what a KV cache hangs on. `documents` numbers the document
        of each token: attention then stays inside of it, and positions begin with it. `depth` and `grad_loops` are
        `depth` and `grad_steps` of every loop. `observe` is given the output of every unrolled layer.
        """
        if documents is not None:
            self.check_documents()
        layout = Layout.of(self._with_depth(depth, len(h)))
        through_coda = depth is not None and depth.through_coda
        alone = [i for i, block in enumerate(self.blocks) if knows(block, h.dtype)] if is_alone(h) else []
        width = self.config.head_dim
        visits, readings = make_visits(
            layout, h, positions, attend, documents, through_coda=through_coda, alone=alone, head_dim=width
        )
        told: list[tuple[int, MoEStats]] = []
        depths: list[Tensor] = []
        early: list[Tensor] = []
        loops = iter(cast("list[Loop]", list(self.loops)))
        options = {"depth": depth, "grad_steps": grad_loops, "stats": stats, "observe": observe}
        for segment, rows in zip(layout.segments, visits, strict=True):
            if segment.looped:
                h, state, reports = self._loop(next(loops), h, rows, readings, cached=attend is not None, **options)
                told += reports
                depths.append(state.depth)
                early = list(state.reads)
            else:
                h = self.run(h, rows[0], told=told if stats else None, observe=observe)
                # The coda's experts are balanced for the read-out that the model is used with, the last one.
                early = [self.run(each, rows[0]) for each in early]
        return Hidden(self.norm(h), told, tuple(depths), tuple(map(self.norm, early)))

    def reader(self) -> Callable[[Tensor], Tensor] | None:
        """The function from what a loop returns to logits, for a model with a head."""
        return None

    def _with_depth(self, depth: Depth | None, batch: int) -> ModelConfig:
        """The config with as many loops as `depth` runs."""
        if depth is None:
            return self.config
        if not self.loops:
            raise ValueError(f"layout {self.config.layout!r} has no looped segment, so {depth} cannot be run")
        counts = {depth.count_steps(cast(Loop, loop), batch) for loop in self.loops}
        # An exit keeps each loop's own number of steps; a compiler cannot follow copying a config.
        own = counts == {segment.loops for segment in self.config.segments if segment.loops is not None}
        return self.config if own else self.config.with_loops(max(counts))

    def _loop(
        self,
        loop: Loop,
        h: Float[Tensor, "B T d"],
        rows: Sequence[Sequence[Visit]],
        readings: Sequence[Visit],
        *,
        depth: Depth | None,
        grad_steps: int | None,
        stats: bool,
        observe: Callable[[Tensor], None] | None,
        cached: bool,
    ) -> tuple[Float[Tensor, "B T d"], LoopState, list[tuple[int, MoEStats]]]:
        """Run one loop, whose steps visit `rows`: what it returns, its state, and what its MoE layers report."""
        decode = self.reader()
        reading = Reading(self.run, decode, readings, len(rows) - 1) if readings and decode is not None else None
        walk = loop.begin(h, depth or Fixed(len(rows)), decode=decode if reading is None else reading)
        held = HeldKeys(walk) if walk.policy.leaves else None
        if reading is not None:
            reading.held = HeldKeys(walk)
        seen: list[list[tuple[int, MoEStats]]] = [[] for _ in rows]
        steps = [
            partial(self.run, visits=row, told=into if stats else None, observe=observe, held=held)
            for row, into in zip(rows, seen, strict=True)
        ]
        h, state = loop(h, steps, depth=walk, return_state=True, grad_steps=grad_steps, recompute=self.checkpointing)
        if held is not None and cached:
            held.skip(visit for row in rows[len(state.live) :] for visit in row)
            if reading is not None:
                reading.skip()
        # What a sequence computes while it waits, or after it has left, is not counted.
        reports = [of_the_live(some, live) for some, live in zip(seen, state.live, strict=False)]
        return h, state, [report for some in reports for report in some]

    def run(
        self,
        h: Tensor,
        visits: Sequence[Visit],
        *,
        told: list[tuple[int, MoEStats]] | None = None,
        observe: Callable[[Tensor], None] | None = None,
        held: HeldKeys | None = None,
    ) -> Tensor:
        """Run some unrolled layers in order; what their MoE layers report is appended to `told` if it is given."""
        # Recomputation is per block: only the blocks' inputs are kept, and blocks are run again one at a time.
        recompute = self.checkpointing and torch.is_grad_enabled()
        for visit in visits:
            block = cast(Block, self.blocks[visit.block])
            slot, rope, live = (visit.attend, visit.rope, None) if held is None else held.enter(visit)
            if visit.turn is not None and told is None and live is None:
                h, seen = run_block(block, h, slot, visit.turn, int(visit.number)), None
            else:
                arguments = (h, slot, rope, visit.number, told is not None, live)
                h, seen = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
            # A visit is counted and observed here, outside the recomputed function, so that it counts once.
            if seen is not None and told is not None:
                told.append((visit.block, seen))
            if observe is not None:
                observe(h if held is None else held.whole(h))
        return h

    def compile_blocks(self, **options) -> None:
        """Compile the blocks and the fused parts of transitions, each once for all visits, but not the loop."""
        for block in self.blocks:
            block.compile(**options)
        for loop in cast("list[Loop]", list(self.loops)):
            if self.config.loop.fused:
                loop.set_form("compiled")

    def reverse_loops(self) -> None:
        """Rebuild the loops' states in the backward pass instead of keeping them, where the transition allows it."""
        for loop in cast("list[Loop]", list(self.loops)):
            loop.reverse()


class LoopedLM(LoopedBody):
    """A `LoopedBody` and the head: a language model.

    >>> model = LoopedLM(ModelConfig.tiny(layout="1-1x3-1", loop={"preset": "hyperloop"}))
    >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
    torch.Size([2, 8, 257])
    """

    def __init__(
        self, config: ModelConfig, *, seed: int | None = None, place: Callable[[Block, int], None] | None = None
    ):
        seed = draw_seed() if seed is None else seed
        super().__init__(config, seed=seed, place=place)
        self.head = Head(config.width, vocab_size=config.vocab_size)
        self._init_weights("head", self.head, seed)
        if config.tied:
            self.head.weight = cast(nn.Parameter, self.embedding.weight)

    def forward(self, tokens: Int[Tensor, "B T"], *, depth: Depth | None = None) -> Float[Tensor, "B T vocab"]:
        """Logits in fp32. `depth` may run the loops another number of times than the layout says."""
        return self.head(self.hidden(self.embed(tokens), depth=depth, stats=False).h)

    def reader(self) -> Callable[[Tensor], Tensor]:
        """The function from what a loop returns to logits, through norm and head; the coda is left out."""
        return lambda h: self.head(self.norm(h))

    def loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        *,
        documents: Int[Tensor, "B T"] | None = None,
        depth: Depth | None = None,
        grad_loops: int | None = None,
        early_weight: float = 1.0,
    ) -> Output:
        """Mean cross entropy of the targets (-100 is ignored), and the loads that balance the experts.

        `documents` is as in `hidden`; the auxiliary loss is over whole rows, whatever documents they contain. If the
        depth has `reads`, the mean loss of these earlier read-outs is added, times `early_weight`.
        """
        h = self.embed(tokens)
        for name, value in {"targets": targets, **({} if documents is None else {"documents": documents})}.items():
            if not isinstance(value, Tensor) or value.shape != tokens.shape:
                given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{name} must have the shape of tokens, {tuple(tokens.shape)}, got {given}")
        self.check_vocabulary(targets.masked_fill(targets == IGNORE, 0))
        h, stats, _, early = self.hidden(h, documents=documents, depth=depth, grad_loops=grad_loops)
        cross_entropy = supervised = self.head(h, targets)
        if early:
            supervised = cross_entropy + early_weight / len(early) * sum(self.head(each, targets) for each in early)
        auxiliary = auxiliary_loss(stats)
        loads: dict[str, list[Tensor]] = {}
        for block, s in stats:
            loads.setdefault(f"blocks.{block}.feedforward", []).append(s.load.sum(0))
        loss = supervised if auxiliary is None else supervised + self.config.aux_coefficient * auxiliary
        return Output(loss, cross_entropy, supervised, {name: torch.stack(rows) for name, rows in loads.items()})


def auxiliary_loss(stats: Sequence[tuple[int, MoEStats]]) -> Tensor | None:
    """The mean over visits of the mean over sequences, without its coefficient; None without a MoE layer."""
    means = [seen.aux_loss.mean() for _, seen in stats if len(seen.aux_loss)]
    return torch.stack(means).mean() if means else None
