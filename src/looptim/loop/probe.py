"""Running loops and models on random inputs in float64, for the numerical checks."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .loop import Loop
from .rules import Carry
from .transition import Record, Transition

M = TypeVar("M", bound=nn.Module)

LATER, ACROSS, AGAIN = "sees later tokens", "sees other sequences of its batch", "is not a function of its input"
"""What may be wrong with a loop."""
SAME = {LATER: "the tokens before", ACROSS: "a sequence", AGAIN: "the same input"}
"""What was not changed, and gets other values all the same."""


def name_of(module: nn.Module) -> str:
    """A loop's name, or the class of a model."""
    return module.name if isinstance(module, Loop) else type(module).__name__


def loops_of(module: nn.Module) -> list[Loop]:
    """The loops inside a module, itself included."""
    return [part for part in module.modules() if isinstance(part, Loop)]


def float64_copy(module: M, *, perturb: float = 0.0, seed: int = 1) -> M:
    """A float64 copy on the CPU in eval mode; its loops' parameters are randomly changed by about `perturb`.

    A negative `perturb` changes each of them by the same amount in the other direction.
    """
    if any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers())):
        raise ValueError(f"{name_of(module)} is on the meta device and has no values; build it on another")
    twin = copied(module, torch.float64).eval()
    generator = _generator(seed)
    for p in itertools.chain.from_iterable(loop.parameters() for loop in loops_of(twin)) if perturb else ():
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu")
        p.data.add_(perturb * (noise / math.sqrt(p.shape[-1]) if p.dim() > 1 else 0.3 * noise))
    return twin


def copied(module: M, dtype: torch.dtype) -> M:
    """A copy on the CPU in another dtype."""
    try:
        return copy.deepcopy(module).to("cpu", dtype)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{name_of(module)} cannot be copied ({first_line(error)}), so it cannot be checked; let its parts hold "
            "numbers, tensors and modules, and no iterators, files or results of earlier calls"
        ) from error


def on_cpu() -> AbstractContextManager[Any]:
    """Makes tensors on the CPU though the caller may be building on another device; where none is, it costs nothing."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def first_line(error: Exception) -> str:
    """What an error says, without its details."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def changed_copy(module: M, scales: tuple[float, ...] = (1.0, 0.1, 0.01), *, seed: int = 1) -> M | None:
    """A copy with randomly changed parameters, or None if the parts cannot run there, as a user's may have bounds."""
    twins = (float64_copy(module, perturb=scale, seed=seed) for scale in scales)
    return next((twin for twin in twins if all(map(stays_finite, loops_of(twin)))), None)


def stays_finite(loop: Loop) -> bool:
    """Whether every step of a loop on a random input is finite."""
    return all(is_finite(record) for _, _, record in run(loop))


def is_finite(record: Record) -> bool:
    """Whether a step's state and both of its writes are finite."""
    return all(bool(t.isfinite().all()) for t in (record.Y, record.H.write(record.g), record.x.write(record.g)))


def random_input(width: int, batch: int = 2, tokens: int = 5) -> Tensor:
    """An input of normal numbers."""
    return torch.randn(batch, tokens, width, generator=_generator(0), dtype=torch.float64, device="cpu")


def random_blocks(width: int) -> Callable[[Tensor], Tensor]:
    """A fixed random network that acts on each token separately, as a stand-in for the blocks."""
    M = torch.randn(width, width, generator=_generator(3), dtype=torch.float64, device="cpu") / math.sqrt(width)
    return lambda o: o + torch.tanh(o @ M.to(o))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def run(loop: Loop) -> Iterator[tuple[Transition, Carry, Record]]:
    """Every step of the loop on a random input, with what was carried into it."""
    e, blocks = random_input(loop.width), random_blocks(loop.width)
    with torch.no_grad():
        Y = loop.start(e)
        carry = loop.schedule()[0].rule.init(Y)
        for transition in loop.schedule():
            record = transition.step(Y, e, blocks, carry)
            yield transition, carry, record
            Y, carry = record.Y, record.carry


def wanting_gradient(given: Tensor) -> Tensor:
    """The input as a training has it: computed from something that requires a gradient."""
    return given.clone().requires_grad_() * 1 if torch.is_grad_enabled() else given


@contextmanager
def alone(module: nn.Module) -> Iterator[None]:
    """Leave the caller's random numbers alone, and refuse to talk to other processes, which see other sequences."""
    with torch.random.fork_rng(devices=[]), _Silence(module) if _in_company() else nullcontext():
        yield


def _in_company() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@final
class _Silence(TorchDispatchMode):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.name = name_of(module)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ValueError(
                f"{self.name} talks to other processes ({func.__name__}), so that it sees other sequences of its "
                "batch; compute with nothing but what a part is given"
            )
        return func(*args, **(kwargs or {}))


def check_held(module: nn.Module, twin: nn.Module, output: Tensor) -> None:
    """A ValueError if a copy of a module computed an output with a parameter of another object than itself."""
    own = {id(p) for p in twin.parameters()}
    names = {id(p): name for name, p in module.named_parameters()}
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            raise ValueError(
                f"{name_of(module)} computes with {names.get(id(leaf), 'a parameter')} by a function or a hook that "
                "holds it, and so does every copy; read it from self, or from the module that a hook is given"
            )
