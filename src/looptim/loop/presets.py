"""Every transition of the paper's tables, ready-made: `build("operloop", width=256, steps=3)`.

A preset is a function of `width`, `steps` and its own options that returns a `Loop`; its docstring's first paragraph is
the summary the zoo prints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, final

from ..base.choices import choose
from .base import Context, Gate, logit
from .controls import (
    CausalStep,
    ConstantDecay,
    ConstantStep,
    Decay,
    GatedStep,
    InverseNormDecay,
    NormStep,
    ResidualDecay,
    SigmoidStep,
    Step,
    StreamDecay,
)
from .diagnose import align
from .loop import Loop
from .maps import Identity, Map
from .objectives import Delta, InnerProduct, NormalizedInnerProduct, Objective
from .projections import (
    Add,
    Concat,
    EulerStateSpace,
    ExactStateSpace,
    Gated,
    MapPart,
    NormedInput,
    Plain,
    Projection,
    Shifted,
    StreamMap,
    StreamRead,
)
from .registry import PRESETS, register
from .rules import GradientDescent, Rule
from .state import Copies, Linear, Mean, Noise, NormedMean
from .transition import TargetBias, TargetNorm, Transition


@final
class IdentityWrite(MapPart):
    """`x = I`: the write map of every vector-state transition that does not write through its own projection."""

    symbol = "I"

    def forward(self, ctx: Context) -> Map:
        return Identity()


def _vector(
    projection: Projection,
    *,
    objective: Objective | None = None,
    rule: Rule | None = None,
    write: MapPart | None = None,
    target: TargetNorm | None = None,
) -> Transition:
    """A transition on a vector state; by default `y' = x^T Blocks(o)`."""
    return Transition(
        projection,
        objective or InnerProduct(),
        rule or GradientDescent(ConstantStep(), ConstantDecay()),
        write=write,
        target=target,
        features=None,
    )


@register
def none(width: int, steps: int) -> Loop:
    """No loop: the plain stack, h_{l+1} = Blocks_l(h_l), whose blocks are not shared between the steps.

    The update is the vanilla one; what differs is the model, which gives every step blocks of its own.
    """
    return Loop(_vector(Plain()), width=width, steps=steps)


@register
def vanilla(width: int, steps: int, *, loop_norm: bool = False, norm_eps: float = 1e-5) -> Loop:
    """The vanilla loop, y' = Blocks(y): the row of Universal Transformers, MoEUT, Recursive Transformers and Ouro.

    `loop_norm=True` is Ouro as released, with the final RMSNorm inside the loop: y' = RMSNorm(Blocks(y)). A model that
    ends with such a loop has no other norm before its head.
    """
    target = TargetNorm(width, eps=norm_eps) if loop_norm else None
    return Loop(_vector(Plain(), target=target), width=width, steps=steps, normed=loop_norm)


@register
def huginn(
    width: int,
    steps: int,
    *,
    inject: str = "add",
    start: str = "noise",
    std: float = math.sqrt(2 / 5),
    seed: int = 0,
    state_init: float = 1.0,
    input_init: float = 1.0,
    readout_norm: bool = False,
    norm_eps: float = 1e-5,
) -> Loop:
    """Huginn, y' = Blocks(y + e), from a random state (Geiping et al., 2025).

    `inject="add"` is the paper's row; `"concat"` is that of the released code, y' = Blocks(A [y, e]), whose write then
    misses A^T; A starts at [`state_init` I, `input_init` I], which no source gives. `start="prelude"` begins at e
    instead of noise of standard deviation `std`. `readout_norm=True` norms what the loop returns, as released; there
    the gain is that of the model's final norm, here it is the loop's own.
    """
    concat = functools.partial(Concat, width, state_init=state_init, input_init=input_init)
    projection = choose("inject", inject, {"add": Add, "concat": concat})()
    write = IdentityWrite() if inject == "concat" else None
    first = choose("start", start, {"noise": functools.partial(Noise, width, std=std, seed=seed), "prelude": Copies})()
    readout = NormedMean(width, eps=norm_eps) if readout_norm else Mean()
    return Loop(_vector(projection, write=write), width=width, steps=steps, start=first, readout=readout)


@register
def parcae(
    width: int,
    steps: int,
    *,
    gain: str = "exact",
    prelude_norm: bool = False,
    norm_eps: float = 1e-5,
    std: float | None = None,
    seed: int = 0,
    keep_init: float = math.sqrt(0.2),
    readout: str = "orthogonal",
    readout_init: float = math.sqrt(2 / 5),
) -> Loop:
    """Parcae, y' = Blocks(Ā y + B̄ e), a diagonal state space with a linear read-out (Prairie et al., 2026).

    `gain="exact"` is the paper's zero-order hold, `"euler"` the released code's; `prelude_norm=True` normalizes e
    first, as the released recipes do. The state starts as noise of `std`, sqrt(2 / (5 d)) as released, Ā at `keep_init`
    and the read-out as an orthogonal matrix times `readout_init`, both as released; with `readout="identity"` it is
    the identity times that, which leaves the features of a pretrained model where they are.
    """
    projection = choose("gain", gain, {"exact": ExactStateSpace, "euler": EulerStateSpace})(width, keep_init=keep_init)
    return Loop(
        _vector(
            NormedInput(projection, width, eps=norm_eps) if prelude_norm else projection,
            write=IdentityWrite(),
        ),
        width=width,
        steps=steps,
        start=Noise(width, std=math.sqrt(2 / (5 * width)) if std is None else std, seed=seed),
        readout=Linear(width, gain=readout_init, start=readout),
    )


@register
def full_bandwidth(width: int, steps: int, *, token_shift: bool = False, read_init: float = 1.0) -> Loop:
    """Full-Bandwidth, y' = Blocks(σ(W_g e) ⊙ W_u y) (Wang et al., 2026).

    `token_shift=True` reads the state of the token before, as the star of the paper's table says. It cannot be aligned
    then: the adjoint would write to an earlier token. No code is public: the gates start at one half and W_u at
    2 `read_init` I, so that the first read is `read_init` times the state.
    """
    gated = Gated(width, read_init=read_init)
    projection = Shifted(gated) if token_shift else gated
    return Loop(_vector(projection, write=IdentityWrite()), width=width, steps=steps)


@register
def recurrentgpt(
    width: int,
    steps: int,
    *,
    noise: float = 0.01,
    gate_bias: float = 0.0,
    state_init: float = 1.0,
    input_init: float = 1.0,
) -> Loop:
    """RecurrentGPT, y' = g ⊙ y + (1 − g) ⊙ Blocks(W [y + ε, e]), g = σ(W_g [y, e] + b) (Hegazy et al., 2026).

    No code is public: `noise` (of ε, in training only) and `gate_bias` (0 keeps half of the state) are our choice, and
    so is W, which starts at [`state_init` I, `input_init` I].
    """
    rule = GradientDescent(GatedStep(width, bias=gate_bias), ConstantDecay())
    projection = Concat(width, noise=noise, state_init=state_init, input_init=input_init)
    return Loop(_vector(projection, rule=rule, write=IdentityWrite()), width=width, steps=steps)


@register
def recirculation(width: int, steps: int, *, alpha: float = 0.10) -> Loop:
    """Recirculation, y' = (1 − α) y + α ‖y‖ Blocks(y)/‖Blocks(y)‖, training-free (Mozer et al., 2026).

    This is the paper's row: the mix of the published method and no more. As published, the mixed state enters a frozen
    model below the layers it came from, the layers above run again, their cache is replaced, the logits come from the
    first pass, and α ramps up over the first ten tokens. A transition knows no positions and no caches.
    """
    rule = GradientDescent(NormStep(alpha), InverseNormDecay())
    return Loop(_vector(Plain(), objective=NormalizedInnerProduct(), rule=rule), width=width, steps=steps)


@register
def hyperloop(
    width: int,
    steps: int,
    *,
    streams: int = 4,
    shared: bool = False,
    read_init: float | None = None,
    write_init: float = 1.0,
    keep_init: float | None = None,
    scale: float = 0.01,
    bias_std: float = 0.0,
) -> Loop:
    """HyperLoop, Y' = H_res Y + H_postᵀ (Blocks(H_pre Y) + b_l), r parallel streams (Zeitoun et al., 2026).

    Initial values are the released ones: every entry of H_pre at `read_init` = σ(1/r), of H_post at `write_init` = 1,
    of H_res at `keep_init` = σ(1), and a at `scale`. With them the state grows by three a loop; 1/r, 0.5 and 0.5 are
    neutral. `bias_std` is that of the loop bias, zero or 0.02 in the releases. `shared=True` uses one transition for
    all loops.
    """
    read_bias = 1 / streams if read_init is None else logit(read_init, "read_init")
    keep_bias = 1.0 if keep_init is None else logit(keep_init, "keep_init")
    write_bias = logit(write_init / 2, "half of write_init")

    def transition() -> Transition:
        return Transition(
            StreamRead(StreamMap(width, streams, name="H_pre", bias=read_bias, scale=scale)),
            InnerProduct(),
            GradientDescent(ConstantStep(), ResidualDecay(width, streams, bias=keep_bias, scale=scale)),
            write=StreamMap(width, streams, name="H_post", bias=write_bias, scale=scale, gain=2.0),
            target=TargetBias(width, std=bias_std),
        )

    return streamed(transition, width, steps, streams=streams, shared=shared)


@register
def operloop(
    width: int,
    steps: int,
    *,
    streams: int = 4,
    objective: str = "delta",
    step: str = "causal",
    shared: bool = False,
    read_init: float | None = None,
    decay_init: float = 0.05,
    step_init: float = 0.75,
    later_step: float | None = None,
    scale: float = Gate.init_scale,
    bias_std: float = 0.0,
) -> Loop:
    """OperLoop, Y' = (I − η Λ) Y + η H_inᵀ (Blocks(H_in Y) − H_in Y): decay, causal step size, delta objective.

    `objective` (`"delta"`, `"inner_product"`) and `step` (`"causal"`, `"sigmoid"`, `"unit"`) are the paper's ablations.
    The initial values are unpublished; docs/framework.md gives the reasons for ours. `read_init` is every entry of
    H_in, 1/sqrt(r) by default: H_in then has unit norm, the local objective unit curvature, and a unit step would move
    the read exactly to its target. `later_step` is where the gates of all loops after the first start, if not at
    `step_init`: with a small one a pretrained model begins nearly as it was, and later loops are small corrections.
    """
    make = functools.partial(
        operloop_transition,
        width,
        streams,
        objective=objective,
        step=step,
        read_init=read_init,
        decay_init=decay_init,
        step_init=step_init,
        scale=scale,
        bias_std=bias_std,
    )
    return streamed(make, width, steps, streams=streams, shared=shared, later_step=later_step)


def operloop_transition(
    width: int,
    streams: int,
    *,
    projection: Callable[[StreamMap], Projection] = StreamRead,
    objective: str | Callable[[], Objective] = "delta",
    rule: Callable[[Step, Decay], Rule] = GradientDescent,
    step: str = "causal",
    read_init: float | None = None,
    decay_init: float = 0.05,
    step_init: float = 0.75,
    scale: float = Gate.init_scale,
    bias_std: float = 0.0,
) -> Transition:
    """OperLoop's transition with every part exchangeable, on which the ablations and the roadmap are built."""
    if isinstance(objective, str):
        objective = choose("objective", objective, {"delta": Delta, "inner_product": InnerProduct})
    make_step = choose("step", step, {"causal": CausalStep, "sigmoid": SigmoidStep, "unit": CausalStep})
    # A single stream cannot be read with exactly 1 through a sigmoid.
    read_init = min(1 / math.sqrt(streams), 0.9) if read_init is None else read_init
    # Random weights are drawn in this order whatever is exchanged, and a step's also where a unit step drops it: with
    # one seed the parts that two variants share start equal, in every loop.
    read = StreamMap(width, streams, name="H_in", bias=logit(read_init, "read_init"), scale=scale)
    decay = StreamDecay(width, streams, bias=logit(decay_init, "decay_init"), scale=scale)
    target = TargetBias(width, std=bias_std)
    drawn = make_step(streams * width, bias=logit(step_init, "step_init"), scale=scale)
    eta = ConstantStep() if step == "unit" else drawn
    return Transition(projection(read), objective(), rule(eta, decay), target=target)


def streamed(
    transition: Callable[..., Transition],
    width: int,
    steps: int,
    *,
    streams: int,
    shared: bool,
    later_step: float | None = None,
) -> Loop:
    """A loop over `streams` copies of e, with one transition per step unless `shared`."""
    if shared and later_step is not None:
        raise ValueError("later_step sets the loops after the first, which share a transition here; set shared=false")
    later = {} if later_step is None else {"step_init": later_step}
    transitions = transition() if shared else [transition(**(later if step else {})) for step in range(steps)]
    return Loop(transitions, width=width, steps=steps, start=Copies(streams))


def _aligned_twin(name: str) -> None:
    preset = PRESETS[name]

    @functools.wraps(preset)
    def aligned(*args: Any, **options: Any) -> Loop:
        return align(preset(*args, **options))

    PRESETS[f"{name}_aligned"] = aligned


for _name in ("parcae", "hyperloop", "full_bandwidth", "recurrentgpt"):
    _aligned_twin(_name)
