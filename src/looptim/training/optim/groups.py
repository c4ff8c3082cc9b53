"""Which optimizer each parameter goes to, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ...base.choices import choose
from ...loop import Loop
from ...model import Attention, Experts, Head, Router, SwiGLU


class Group(NamedTuple):
    """A row of the table of groups: which parameters it holds, their optimizer, and whether they decay."""

    owners: tuple[type[nn.Module], ...]
    kind: Literal["muon", "adamw"]
    decays: bool


# The outermost owner of a parameter decides; the vectors of any owner but a transition form one group.
GROUPS = {
    "matrices": Group((Attention, SwiGLU), "muon", True),
    "experts": Group((Experts,), "muon", True),
    "embedding": Group((nn.Embedding,), "adamw", True),
    "head": Group((Head,), "adamw", True),
    "router": Group((Router,), "adamw", True),
    "other": Group((), "adamw", True),
    "vectors": Group((), "adamw", False),
    "transition": Group((Loop,), "adamw", False),
    "adapters": Group((), "adamw", False),
}


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    matrices: Literal["muon", "adamw"] = "muon",
    rates: Mapping[str, float] | None = None,
    role: Callable[[nn.Module, str, Tensor], str] | None = None,
) -> list[dict[str, Any]]:
    """What `MuonAdamW` takes: every trainable parameter in exactly one group, tied ones once.

    Muon takes q, k, v, o of attention (the paper does not place o), gate, up, down of every feedforward and expert;
    AdamW takes the embedding, the head, the router, vectors (norms, biases) and all of the transition. Matrices decay;
    vectors do not, nor does anything of a transition: its parameters are gates and rates around a chosen point, and the
    released Parcae decays none of them either. `matrices="adamw"` leaves Muon out. `rates` are factors of the learning
    rate, by the names of `GROUPS`, and `role` gives the group of a parameter where the layers are not ours.
    """
    find = role or role_of
    for name in rates or {}:
        choose("group of parameters", name, GROUPS)
    members: dict[str, dict[str, list]] = {name: {"params": [], "param_names": []} for name in GROUPS}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = members[find(model, name, parameter)]
            group["params"].append(parameter)
            group["param_names"].append(name)
    groups: list[dict[str, Any]] = [
        {
            "name": name,
            **members[name],
            "kind": matrices if row.kind == "muon" else row.kind,
            "weight_decay": weight_decay if row.decays else 0.0,
        }
        for name, row in GROUPS.items()
        if members[name]["params"]
    ]
    set_rate(groups, lr, rates)
    return groups


def set_rate(groups: Iterable[dict[str, Any]], lr: float, rates: Mapping[str, float] | None = None) -> None:
    """Give every group its factor of the learning rate."""
    for group in groups:
        group["lr"] = lr * (rates or {}).get(group["name"], 1.0)


def role_of(model: nn.Module, name: str, parameter: Tensor) -> str:
    """The group of a parameter, by the modules that own it."""
    path = name.split(".")
    owners = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    found = next((name for module in owners for name, row in GROUPS.items() if isinstance(module, row.owners)), "other")
    return "vectors" if parameter.ndim < 2 and found != "transition" else found


def describe_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The contents of groups, or of an optimizer's `param_groups`, to print or to record as JSON.

    >>> describe_groups(parameter_groups(nn.Embedding(5, 2), lr=1e-3))[0]["names"]
    ['weight']
    """
    return [
        {
            **{key: group[key] for key in ("name", "kind", "lr", "weight_decay")},
            "tensors": len(group["params"]),
            "parameters": sum(p.numel() for p in group["params"]),
            "names": list(group["param_names"]),
        }
        for group in groups
    ]
