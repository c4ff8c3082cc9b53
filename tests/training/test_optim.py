"""Polar Express against the SVD, the optimizer against its equations and torch's own, groups, schedule, clipping."""

import copy
import io
import json
import math

import pytest
import torch
from support import config, losses
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import looptim as lo
from looptim.base import numerics
from looptim.base.numerics import polar_express
from looptim.config import ModelConfig
from looptim.model.lm import LoopedLM
from looptim.training.optim import (
    MuonAdamW,
    clip_gradients,
    describe_groups,
    learning_rate,
    muon,
    parameter_groups,
)

SIZES = {"layout": "1-2x2-1", "vocab_size": 61, "tied": False, "pattern": "SSSF", "init_std": 0.006}
SHAPES = [(1, 9), (48, 48), (48, 80), (64, 128), (128, 64), (33, 301), (301, 33)]


def model(preset="operloop", **changes):
    return LoopedLM(ModelConfig.tiny(**SIZES | {"loop": {"preset": preset}} | changes), seed=0)


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(step))
        loss = model.loss(tokens[:, :-1], tokens[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def matrix(shape, spectrum):
    """A matrix whose smallest singular value is 1e-3 of its Frobenius norm, and its polar factor."""
    U, S, Vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    if spectrum == "even in the logarithm":
        S = torch.logspace(0, -4, len(S), dtype=torch.float64)
    elif spectrum == "one large":
        S = torch.full_like(S, 1e-4).index_fill(0, torch.tensor([0]), 1.0)
    for _ in range(50):
        S = S.clamp_min(1e-3 * S.norm())
    return (U * S @ Vh).float(), U @ Vh


def by_definition(G, steps=6):
    """Polar Express of one matrix, in float64."""
    G = G.double()
    X = (G.T if G.shape[0] > G.shape[1] else G) / (1.01 * G.norm() + 1e-7)
    for a, b, c in numerics.POLAR_EXPRESS[:steps]:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.shape[0] > G.shape[1] else X


@pytest.mark.parametrize("spectrum", ["random", "even in the logarithm", "one large"])
@pytest.mark.parametrize("shape", SHAPES)
def test_polar_express_is_the_polar_factor(shape, spectrum):
    G, factor = matrix(shape, spectrum)
    found = polar_express(G).double()
    values = torch.linalg.svdvals(found)
    assert values.min() >= 0.99 and values.max() <= 1.01
    assert torch.linalg.matrix_norm(found - factor, 2) <= 0.01
    torch.testing.assert_close(found, by_definition(G), atol=2e-5, rtol=0)


def test_polar_express_ignores_scale():
    G = torch.randn(24, 40)
    for scale in (1e-3, 1e6):
        torch.testing.assert_close(polar_express(scale * G), polar_express(G), atol=1e-4, rtol=0)


@pytest.mark.parametrize("steps", [1, 3, 4, 6, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float64, 1e-12)])
def test_the_gram_form_is_the_plain_one(monkeypatch, steps, dtype, tolerance):
    G = torch.randn(5, 16, 48, dtype=dtype)
    # Of rank one, of zeros, and with singular values that are not quite nothing: where only rounding is left, either
    # form is up to 1e-4 off in fp32.
    G[1] = G[1, :, :1] * G[1, :1]
    G[2] = 0
    G[3] = G[3, :, :1] * G[3, :1] + 1e-4 * G[3]
    fast = polar_express(G, steps)
    monkeypatch.setattr(numerics, "gram_pays", lambda X: False)
    torch.testing.assert_close(fast, polar_express(G, steps), atol=tolerance, rtol=0)
    assert not fast[2].any()


def test_the_gram_form_is_used_in_full_precision_only():
    wide = torch.zeros(1, 8, 16)
    assert numerics.gram_pays(wide) and numerics.gram_pays(wide.double())
    assert not numerics.gram_pays(wide.bfloat16()) and not numerics.gram_pays(wide[..., :15])
    torch.set_float32_matmul_precision("high")
    try:
        assert not numerics.gram_pays(wide)
    finally:
        torch.set_float32_matmul_precision("highest")
    # Chosen by torch's newer names, the older function only raises.
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix"):
            torch.get_float32_matmul_precision()
        assert not numerics.gram_pays(wide) and polar_express(torch.eye(4, 8)).isfinite().all()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("shape", [(3, 2, 8, 20), (5, 20, 8), (2, 3, 12, 12), (0, 4, 8), (0, 4, 4)])
def test_batches_are_matrices_one_by_one(monkeypatch, shape):
    monkeypatch.setattr(numerics, "CACHED_NUMEL", 2 * shape[-1] * shape[-2])
    G = torch.randn(shape)
    found = polar_express(G)
    assert found.shape == G.shape
    for X, one in zip(found.flatten(0, -3), G.flatten(0, -3), strict=True):
        torch.testing.assert_close(X.double(), by_definition(one), atol=2e-5, rtol=0)


def test_bf16_on_a_cpu_is_computed_in_fp32():
    G = torch.randn(8, 24).bfloat16()
    found = polar_express(G)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, polar_express(G.float()).bfloat16(), atol=0, rtol=0)


def test_autocast_does_not_reach_it():
    G = torch.randn(8, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = polar_express(G)
    assert torch.equal(found, polar_express(G))


@pytest.mark.parametrize(("arguments", "message"), [((torch.ones(3),), "polar factor"), ((torch.eye(3), 0), "steps")])
def test_polar_express_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        polar_express(*arguments)


def muon_group(*parameters, lr=0.1, weight_decay=0.0):
    return [{"params": list(parameters), "kind": "muon", "lr": lr, "weight_decay": weight_decay}]


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12), (3, 8, 20)])
def test_muon_follows_its_equations(shape):
    p = nn.Parameter(torch.randn(shape))
    expected, buffer = p.detach().double(), torch.zeros(shape, dtype=torch.float64)
    optimizer = MuonAdamW(muon_group(p, lr=0.1, weight_decay=0.5))
    for _ in range(3):
        p.grad = torch.randn(shape)
        optimizer.step()
        g = p.grad.double()
        buffer = 0.95 * buffer + g
        update = (g + 0.95 * buffer).reshape(-1, *shape[-2:])
        factor = torch.stack([by_definition(u) for u in update]).reshape(shape)
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * 0.18 * math.sqrt(max(shape[-2:])) * factor
    torch.testing.assert_close(p.detach().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32), (4, 16, 48)])
def test_the_rms_of_an_update_is_018_times_the_rate(shape):
    p = nn.Parameter(torch.zeros(shape))
    # Of full rank: a direction the gradient does not have is not in the update either.
    p.grad = torch.eye(*shape[-2:]).expand(shape) + 0.02 * torch.randn(shape)
    MuonAdamW(muon_group(p, lr=0.5)).step()
    rms = p.detach().square().mean((-2, -1)).sqrt()
    torch.testing.assert_close(rms, torch.full_like(rms, 0.5 * 0.18), rtol=5e-3, atol=0)


def test_each_expert_is_orthogonalized_by_itself():
    p = nn.Parameter(torch.zeros(4, 8, 16))
    # Gradients of unlike sizes: flattened to one matrix, the small ones would hardly move.
    p.grad = torch.randn(4, 8, 16) * torch.tensor([1.0, 1e-2, 1e-4, 0.0]).reshape(4, 1, 1)
    MuonAdamW(muon_group(p, lr=1 / (0.18 * math.sqrt(16)))).step()
    values = torch.linalg.svdvals(p.detach())
    torch.testing.assert_close(values[:3], torch.ones(3, 8), atol=0.01, rtol=0)
    assert not p[3].any()


@pytest.mark.parametrize("name", ["CACHED_NUMEL", "BATCHED_NUMEL"])
def test_how_matrices_are_batched_does_not_matter(monkeypatch, name):
    torch.manual_seed(1)
    shapes = [(8, 24), (8, 24), (3, 8, 24), (24, 8), (8, 24), (3, 8, 24)]
    together = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    alone = copy.deepcopy(together)
    for p, q in zip(together, alone, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    MuonAdamW(muon_group(*together)).step()
    monkeypatch.setattr(numerics if name == "CACHED_NUMEL" else muon, name, 1)
    MuonAdamW(muon_group(*alone)).step()
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(32, 32), (24, 80), (80, 24)])
def test_with_the_classic_triple_it_is_torchs_muon(monkeypatch, shape):
    """torch's has the factor 0.2, keeps (1 - 0.95) times our momentum, and works in bf16."""
    monkeypatch.setattr(numerics, "POLAR_EXPRESS", ((3.4445, -4.7750, 2.0315),) * 5)
    ours = nn.Parameter(torch.randn(shape))
    theirs = nn.Parameter(ours.detach().clone())
    start = ours.detach().clone()
    optimizers = [
        MuonAdamW(muon_group(ours, lr=0.01 * 0.2 / 0.18, weight_decay=0.5 * 0.18 / 0.2), polar_steps=5),
        torch.optim.Muon([theirs], lr=0.01, weight_decay=0.5, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - theirs).norm() <= 0.03 * (theirs - start).norm()


@pytest.mark.parametrize(("fused", "tolerance"), [(True, 0.0), (False, 1e-7)])
def test_the_rest_is_torchs_adamw(fused, tolerance):
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(5,), (6, 7), (1,)]]
    theirs = copy.deepcopy(ours)
    optimizers = [
        MuonAdamW([{"params": ours, "kind": "adamw", "lr": 1e-2, "weight_decay": 0.1}]),
        torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=fused),
    ]
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=tolerance, rtol=tolerance)


def test_a_parameter_without_a_gradient_stays():
    p, q = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    optimizer = MuonAdamW([*muon_group(p), {"params": [q], "kind": "adamw", "lr": 1.0, "weight_decay": 0.5}])
    assert optimizer.step(lambda: "the closure's") == "the closure's"
    assert torch.equal(p, torch.ones(4, 4)) and torch.equal(q, torch.ones(4))
    # Its state is there all the same: a checkpoint of before its first gradient loads like one of after.
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())
    assert set(optimizer.state) == {p, q}


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"kind": "sgd"}, "kind is 'muon' or 'adamw', got 'sgd'"),
        ({"lr": -1.0}, "lr must not be negative"),
        ({"weight_decay": float("nan")}, "weight_decay must not be negative"),
        ({"params": [nn.Parameter(torch.ones(3))]}, "not a matrix"),
    ],
)
def test_wrong_groups_are_refused(group, message):
    with pytest.raises(ValueError, match=message):
        MuonAdamW([{**muon_group(nn.Parameter(torch.eye(3)))[0], **group}])


def test_a_group_without_a_kind_is_refused():
    with pytest.raises(ValueError, match="a group needs 'kind'"):
        MuonAdamW([{"params": [nn.Parameter(torch.eye(3))], "lr": 1.0, "weight_decay": 0.0}])


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def plain_round_trip(model, optimizer, again, optimizer_again):
    optimizer_again.load_state_dict(saved_and_loaded(optimizer.state_dict()))


def dcp_round_trip(model, optimizer, again, optimizer_again, **options):
    options = StateDictOptions(**options)
    state = saved_and_loaded(get_optimizer_state_dict(model, optimizer, options=options))
    set_optimizer_state_dict(again, optimizer_again, state, options=options)


def flat_dcp_round_trip(*pair):
    dcp_round_trip(*pair, flatten_optimizer_state_dict=True)


@pytest.mark.parametrize("round_trip", [plain_round_trip, dcp_round_trip, flat_dcp_round_trip])
def test_a_resumed_run_is_the_same_bit_for_bit(round_trip):
    one = model()
    optimizer = MuonAdamW(parameter_groups(one, lr=1e-2))
    train(one, optimizer, 3)
    two = model()
    optimizer_two = MuonAdamW(parameter_groups(two, lr=1e-2))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    round_trip(one, optimizer, two, optimizer_two)
    assert describe_groups(optimizer_two.param_groups) == describe_groups(optimizer.param_groups)
    assert train(one, optimizer, 3, first=3) == train(two, optimizer_two, 3, first=3)
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.long
def test_it_learns():
    model_ = model()
    optimizer = MuonAdamW(parameter_groups(model_, lr=1e-2))
    tokens = torch.randint(61, (2, 13))
    losses = []
    for _ in range(30):
        loss = model_.loss(tokens[:, :-1], tokens[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(model_.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 < 4 < losses[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("preset", [preset for preset in lo.PRESETS if preset != "none"])
def test_every_parameter_is_in_one_group(preset, tied):
    model_ = model(preset, tied=tied)
    groups = parameter_groups(model_, lr=1e-3)
    names = [name for group in groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model_.named_parameters())
    assert len(MuonAdamW(groups).param_groups) == len(groups)


def test_what_goes_where():
    model_ = model()
    groups = {group["name"]: group for group in describe_groups(parameter_groups(model_, lr=1e-3))}
    names = {name: set(group["names"]) for name, group in groups.items()}
    blocks = range(len(model_.blocks))
    attention = {f"blocks.{b}.attention.{part}.weight" for b in blocks for part in "qkvo"}
    feedforward = {
        f"blocks.{b}.feedforward.{'shared.' if b else ''}{part}.weight"
        for b in blocks
        for part in ("gate", "up", "down")
    }
    assert names["matrices"] == attention | feedforward
    experts = {f"blocks.{b}.feedforward.experts.{part}" for b in blocks if b for part in ("gate", "up", "down")}
    assert names["experts"] == experts
    assert names["router"] == {f"blocks.{b}.feedforward.router.weight" for b in blocks if b}
    assert names["embedding"] == {"embedding.weight"} and names["head"] == {"head.weight"}
    assert names["transition"] == {name for name, _ in model_.named_parameters() if name.startswith("loops.")}
    assert all("norm" in name for name in names["vectors"]) and "norm.gain" in names["vectors"]
    assert "other" not in groups
    assert {name for name, group in groups.items() if group["kind"] == "muon"} == {"matrices", "experts"}
    decays = {name: group["weight_decay"] for name, group in groups.items()}
    assert {name for name, decay in decays.items() if decay == 0} == {"vectors", "transition"}
    assert set(decays.values()) == {0.0, 0.1}
    assert sum(group["parameters"] for group in groups.values()) == sum(p.numel() for p in model_.parameters())
    json.dumps(groups)


def test_groups_without_muon_of_what_is_trainable():
    model_ = model()
    model_.embedding.weight.requires_grad_(False)
    groups = parameter_groups(model_, lr=1e-3, weight_decay=0.0, matrices="adamw")
    assert {group["kind"] for group in groups} == {"adamw"}
    assert "embedding" not in [group["name"] for group in groups]


def test_the_schedule():
    rates = [learning_rate(step, peak=1e-3, warmup=10, total=100) for step in range(120)]
    assert rates[0] == pytest.approx(1e-4) and rates[9] == 1e-3 and rates[99] == 1e-5 and set(rates[99:]) == {1e-5}
    assert rates[54] == pytest.approx((1e-3 + 1e-5) / 2)
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)
    assert learning_rate(0, peak=1.0, warmup=0, total=1) == 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total": 0, "warmup": 0}, "total must be at least one step, got 0"),
        ({"warmup": 100}, "warmup must .* got 100"),
        ({"warmup": -1}, "warmup must .* got -1"),
        ({"minimum": 1e-2}, "minimum must .* got 0.01"),
        ({"peak": float("nan")}, "minimum must"),
        ({"step": -1}, "steps count from 0, got -1"),
    ],
)
def test_impossible_schedules_are_refused(changes, message):
    options = {"step": 0, "peak": 1e-3, "minimum": 1e-5, "warmup": 10, "total": 100, **changes}
    with pytest.raises(ValueError, match=message):
        learning_rate(options.pop("step"), **options)


@pytest.mark.parametrize("max_norm", [0.5, 1e3, math.inf])
def test_clipping_is_torchs(max_norm):
    ours = [nn.Parameter(torch.zeros(shape)) for shape in [(3, 4), (5,)]]
    theirs = copy.deepcopy(ours)
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    norm = clip_gradients([*ours, nn.Parameter(torch.zeros(2))], max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, max_norm))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_clipping_nothing_and_by_nothing():
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0) == 0
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        clip_gradients([], 0)


@pytest.mark.long
def test_a_group_may_have_a_rate_of_its_own(tmp_path):
    changed = config(optim={"rates": {"transition": 0.5}}, steps=3)
    model = lo.LoopedLM(changed.model, seed=0)
    groups = parameter_groups(model, lr=0.2, rates=changed.optim.rates)
    assert {group["name"]: group["lr"] for group in groups if group["name"] in ("transition", "experts")} == {
        "transition": 0.1,
        "experts": 0.2,
    }
    rates = {}
    for name, each in {"own": changed, "same": config(steps=3)}.items():
        run = lo.train(each, tmp_path / name, progress=False)
        rates[name] = losses(run)
    assert rates["own"][1] == rates["same"][1]
    assert rates["own"][3] != rates["same"][3]


def test_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match="unknown group of parameters 'transitions', did you mean 'transition'"):
        parameter_groups(torch.nn.Linear(2, 2), lr=0.1, rates={"transitions": 0.5})
