"""Choosing thresholds at which tokens leave: the whole command on a tiny run, and its parts."""

import json

import numpy as np
import pytest
import torch
from support import config, packed

import looptim as lo
from looptim.evaluation.exits import Pair, _oracle, _screened, evaluate_exits, run_exits
from looptim.evaluation.frontier import upper_bound
from looptim.loop.depth import Exit, Fixed, PerToken
from looptim.model import IGNORE
from looptim.reporting.exits import read_exits, report_exits
from looptim.training.exit_gate import read_every_loop, train_gate


def small_model(preset="operloop"):
    return lo.LoopedLM(lo.ModelConfig.tiny(layout="1-1x3-1", loop={"preset": preset}, init_std=0.2), seed=0).eval()


def pair():
    tokens = torch.randint(257, (4, 12), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1).clone()
    targets[:, ::3] = IGNORE
    return Pair(tokens, targets)


def test_a_loss_by_loop_is_that_of_a_model_that_stops_there():
    model = small_model("vanilla")
    losses, states = read_every_loop(model, *pair())
    assert losses.shape == (3, 4, 12) and states.shape == (3, 4, 12, 32)
    known = pair().targets != IGNORE
    for steps in (1, 2, 3):
        stopped = model.loss(*pair(), depth=Fixed(steps)).cross_entropy
        torch.testing.assert_close(losses[steps - 1][known].mean(), stopped)


def test_what_is_read_out_early_is_supervised():
    model = small_model("vanilla")
    single = [model.loss(*pair(), depth=Fixed(steps)).cross_entropy for steps in (1, 2, 3)]
    out = model.loss(*pair(), depth=Fixed(3, reads=(1, 2)), early_weight=0.5)
    torch.testing.assert_close(out.cross_entropy, single[2])
    torch.testing.assert_close(out.supervised, single[2] + 0.25 * (single[0] + single[1]))


def test_a_run_counts_losses_and_loops_of_predicted_tokens():
    model, given = small_model(), pair()
    depths = torch.randint(1, 4, (4, 12), generator=torch.Generator().manual_seed(1))
    out = run_exits(model, [given], [PerToken(depths)])
    known = given.targets != IGNORE
    assert out.loops == pytest.approx(depths[known].double().mean().item())
    wanted = model.loss(*given, depth=PerToken(depths)).cross_entropy.item()
    assert out.loss == pytest.approx(wanted, rel=1e-5) and out.by_window.shape == (4,)


def test_an_oracle_weighs_loss_against_loops_and_a_bound_holds():
    losses = torch.tensor([3.0, 2.0, 1.9]).reshape(3, 1, 1).expand(3, 1, 2)
    targets = torch.tensor([[5, IGNORE]])
    for price, depth in ((0.01, 3), (0.5, 2), (2.0, 1)):
        for more in (0, 1):
            [policy] = _oracle([Pair(targets, targets)], [losses], price, more)
            assert policy.counts.tolist() == [[min(depth + more, 3), 3]]
    generator = np.random.default_rng(0)
    held = [upper_bound(generator.normal(1.0, 2.0, 12), 0.9) >= 1.0 for _ in range(2000)]
    assert 0.88 < np.mean(held) < 0.92


def test_what_is_screened_with_patience_reads_a_later_loss():
    model, given = small_model(), pair()
    losses, _ = read_every_loop(model, *given)
    values, known = torch.tensor([0.1, 0.5]).reshape(2, 1, 1).expand(2, 4, 12), given.targets != IGNORE
    for threshold, patience, loops in ((0.0, 1, 3), (0.2, 0, 1), (0.2, 1, 2), (0.2, 5, 3)):
        [row] = _screened([losses], [given], [values], [Exit("residual", threshold, patience=patience)])
        assert row["loops"] == loops and row["loss"] == pytest.approx(losses[loops - 1][known].mean().item(), rel=1e-5)


def test_a_gate_learns_where_a_loop_helps():
    model = small_model()
    _, states = read_every_loop(model, *pair())
    gate = train_gate(model, [tuple(pair())] * 60)
    losses, _ = read_every_loop(model, *pair())
    helps = torch.sigmoid(50 * ((losses[:-1] - losses[1:]).clamp_min(0) - 0.005))
    known = (pair().targets != IGNORE).expand_as(helps)
    stays = gate.stay(states[:-1])
    assert stays[known & (helps > 0.5)].mean() > stays[known & (helps < 0.5)].mean() + 0.5
    assert not any(p.requires_grad for p in gate.parameters())
    assert model(pair().tokens, depth=Exit(gate, 0.5)).isfinite().all()


@pytest.mark.long
def test_a_run_is_evaluated_and_reported(tmp_path):
    recipe = config(
        model={"layout": "1-1x3-1", "loop": {"preset": "vanilla"}}, loops={"readouts": 1}, steps=4, checkpoint_every=4
    )
    run = lo.train(recipe, tmp_path / "run", progress=False)
    record = evaluate_exits(run, windows=8, quiet=True)
    assert [round(row["loops"]) for row in record["static"]] == [1, 2, 3]
    assert set(record["signals"]) == {*lo.signals.SIGNALS, "gate", "residual+1", "entropy+1"}
    for name, row in record["signals"].items():
        assert 1 <= row["chosen"]["loops"] <= 3 and sum(row["histogram"]) == pytest.approx(1)
        loops = [point["loops"] for point in row["curve"]]
        assert (min(loops) < 3 or name == "acceleration") and len(row["screened"]) == len(loops)
        assert "+" not in name or row["histogram"][0] == 0
    assert record["flops"]["full"] >= record["flops"]["spent"] and set(record["speed"]) == {"1", "8", "32"}
    page = report_exits(read_exits([run]), tmp_path / "report")
    [chart] = packed(page.read_text())["charts"]
    assert chart["caption"].startswith("Every point was run for real; the oracle")
    assert "| residual |" in (tmp_path / "report" / "exits.md").read_text()
    assert json.loads((run / "eval" / "exits.json").read_text())["settings"]["prefill"] == "with exits"
    with pytest.raises(ValueError, match=r"has no eval/exits\.json; run `looptim evaluate"):
        read_exits([tmp_path])
    with pytest.raises(ValueError, match="windows must be at least 8"):
        evaluate_exits(run, windows=4)
