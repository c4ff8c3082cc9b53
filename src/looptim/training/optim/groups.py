"""Which parameter goes to which optimizer, and what decays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor, nn

from ...loop import Loop
from ...model import Attention, Experts, Head, Router, SwiGLU

# Who owns a parameter decides where it goes; the outermost of these counts.
ROLES: dict[type[nn.Module], str] = {
    Loop: "transition",
    Experts: "experts",
    Attention: "matrices",
    SwiGLU: "matrices",
    Router: "router",
    Head: "head",
    nn.Embedding: "embedding",
}
GROUPS = ("matrices", "experts", "embedding", "head", "router", "other", "vectors", "transition")
UNDECAYED = ("vectors", "transition")


def parameter_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.1, matrices: Literal["muon", "adamw"] = "muon"
) -> list[dict[str, Any]]:
    """What `MuonAdamW` takes: every trainable parameter in exactly one group, tied ones once.

    Muon takes q, k, v, o of attention (the paper does not place o), gate, up, down of every feedforward and expert;
    AdamW takes the embedding, the head, the router, vectors (norms, biases) and all of the transition. Matrices decay;
    vectors do not, nor does anything of a transition: its parameters are gates and rates around a chosen point, and the
    released Parcae decays none of them either. `matrices="adamw"` leaves Muon out.
    """
    groups = {name: {"name": name, "params": [], "param_names": []} for name in GROUPS}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups[role(model, name, parameter)]
            group["params"].append(parameter)
            group["param_names"].append(name)
    for name, group in groups.items():
        group["kind"] = matrices if name in ("matrices", "experts") else "adamw"
        group["lr"] = lr
        group["weight_decay"] = 0.0 if name in UNDECAYED else weight_decay
    return [group for group in groups.values() if group["params"]]


def role(model: nn.Module, name: str, parameter: Tensor) -> str:
    """The group of a parameter, by the modules that own it."""
    path = name.split(".")
    owners = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    found = next((role for module in owners for kind, role in ROLES.items() if isinstance(module, kind)), "other")
    return "vectors" if parameter.ndim < 2 and found != "transition" else found


def describe_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What went where, to print or to record as JSON: of groups, or of an optimizer's `param_groups`.

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
