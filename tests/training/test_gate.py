"""What sees the future, or is no gradient step, is not trained; what is meant to stands in every table."""

import json
import time

import pytest
import torch
import torch.nn.functional as F
from support import config, packed

import looptim as lo
from looptim.loop.registry import NUMERICS, code_of
from looptim.studies.spec import Cell, load_plan
from looptim.training.gate import check_transition

pytestmark = pytest.mark.long


class Peeking(lo.Projection):
    """`o = y + e` of the next token: a leak that diagnose and check_gradient once found aligned and exact."""

    def forward(self, ctx):
        return lo.maps.Identity(), F.pad(ctx.e[:, 1:], (0, 0, 0, 1))


class Uphill(lo.Objective):
    def value(self, o, t):
        return 0.5 * (o - t).square().sum(-1)

    def grad(self, o, t):
        return t - o


def loop_of(width, steps, *, projection=None, objective=None):
    descent = lo.rules.GradientDescent(lo.controls.ConstantStep(), lo.controls.ConstantDecay())
    transition = lo.Transition(projection or lo.projections.Plain(), objective or lo.objectives.InnerProduct(), descent)
    return lo.Loop(transition, width=width, steps=steps, name="mine")


@pytest.fixture
def presets(monkeypatch):
    """Presets of one's own, for the length of a test."""
    monkeypatch.setitem(lo.PRESETS, "peeking", lambda width, steps: loop_of(width, steps, projection=Peeking()))
    monkeypatch.setitem(lo.PRESETS, "uphill", lambda width, steps: loop_of(width, steps, objective=Uphill()))
    monkeypatch.setitem(lo.PRESETS, "wide_only", wide_only)
    monkeypatch.setitem(lo.PRESETS, "long_only", long_only)


def wide_only(width, steps):
    """Builds at one width only, and leaks there."""
    if width != 640:
        raise ValueError("wide_only is for a width of 640")
    return loop_of(width, steps, projection=Peeking())


class PeekingFar(lo.Projection):
    def forward(self, ctx):
        far = ctx.e[:, 1:] if ctx.e.shape[1] > 1000 else ctx.e[:, :0]
        return lo.maps.Identity(), F.pad(far, (0, 0, 0, ctx.e.shape[1] - far.shape[1]))


def long_only(width, steps):
    """Leaks in sequences as long as those of the training only."""
    return loop_of(width, steps, projection=PeekingFar())


class Peek(lo.Projection):
    """Sees the next token where `when(ctx)` says so."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def forward(self, ctx):
        return lo.maps.Identity(), F.pad(ctx.e[:, 1:], (0, 0, 0, 1)) if self.when(ctx) else ctx.e


class Counted(lo.Step):
    """Shrinks from step to step, and sees the next token after sixteen of them."""

    def forward(self, ctx, previous):
        peek = torch.sigmoid(F.pad(ctx.e[:, 1:], (0, 0, 0, 1))[..., :1]).unsqueeze(-1)
        return 0.98 * previous * torch.where(torch.as_tensor(previous) < 0.98**16, peek, 1.0)


def deep_only(width, steps):
    descent = lo.rules.GradientDescent(Counted(), lo.controls.ConstantDecay())
    transition = lo.Transition(lo.projections.Add(), lo.objectives.InnerProduct(), descent)
    return lo.Loop(transition, width=width, steps=steps, name="mine")


@pytest.mark.parametrize(
    ("when", "settings"),
    [
        (lambda ctx: ctx.e.shape[1] == 48, {"seq_len": 48}),
        (lambda ctx: len(ctx.e) == 5, {"batch_size": 10, "micro_batch": 5}),
    ],
    ids=["length", "batch"],
)
def test_a_leak_of_a_training_as_it_is_set_is_found(monkeypatch, when, settings):
    monkeypatch.setitem(lo.PRESETS, "peek", lambda w, s: loop_of(w, s, projection=Peek(when)))
    given = {"loop": {"preset": "peek"}, "max_length": 64}
    check_transition(config(model=given))
    with pytest.raises(ValueError, match=r"^mine sees later tokens"):
        check_transition(config(model=given, **settings))


@pytest.mark.parametrize(
    "when",
    [
        lambda ctx: len(ctx.e) == 1 and ctx.e.shape[1] == 48,
        lambda ctx: torch.is_grad_enabled() and not ctx.e.requires_grad and ctx.e.shape[1] > 7,
        lambda ctx: ctx.e.dtype == torch.bfloat16,
    ],
    ids=["alone", "after frozen layers", "in bf16"],
)
def test_a_leak_that_only_an_evaluation_would_show_is_found(monkeypatch, when):
    monkeypatch.setitem(lo.PRESETS, "peek", lambda w, s: loop_of(w, s, projection=Peek(when)))
    with pytest.raises(ValueError, match=r"^mine sees later tokens"):
        check_transition(config(model={"loop": {"preset": "peek"}, "max_length": 64}, seq_len=48))


def test_a_leak_of_a_wide_loop_in_a_long_sequence_is_found(monkeypatch):
    peek = Peek(lambda ctx: ctx.e.shape[1] == 4096)
    monkeypatch.setitem(lo.PRESETS, "peek", lambda w, s: loop_of(w, s, projection=peek))
    given = config(model={"loop": {"preset": "peek"}, "max_length": 4096, "width": 1024}, seq_len=4096)
    with pytest.raises(ValueError, match="sees later tokens: among 4 sequences of 4096 tokens"):
        check_transition(given)


def test_a_leak_after_more_loops_than_the_layout_has_is_found(monkeypatch):
    monkeypatch.setitem(lo.PRESETS, "deep_only", deep_only)
    check_transition(config(model={"loop": {"preset": "deep_only"}}))
    with pytest.raises(ValueError, match="sees later tokens"):
        check_transition(config(model={"loop": {"preset": "deep_only"}}, loops={"scheme": "huginn", "mean": 12}))


@pytest.mark.parametrize("preset", lo.PRESETS)
def test_every_shipped_preset_is_trained(preset):
    if preset != "none":
        check_transition(config(model={"loop": {"preset": preset}}))


def test_a_leak_is_not_trained_and_leaves_nothing_behind(presets, tmp_path):
    with pytest.raises(ValueError, match=r"^mine sees later tokens: the bias of the projection Peeking.*noncausal"):
        lo.train(config(model={"loop": {"preset": "peeking"}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_wrong_sign_is_not_trained(presets):
    with pytest.raises(ValueError, match=r"`grad` of Uphill is not the derivative .* has the wrong sign"):
        check_transition(config(model={"loop": {"preset": "uphill"}}))


def test_a_loop_that_is_bound_to_its_width_is_asked_at_its_width(presets):
    with pytest.raises(ValueError, match="sees later tokens"):
        check_transition(config(model={"width": 640, "loop": {"preset": "wide_only"}}))


def test_a_leak_of_long_sequences_only_is_found(presets):
    given = config(model={"max_length": 1024, "loop": {"preset": "long_only"}}, seq_len=1024)
    with pytest.raises(ValueError, match="sees later tokens: among 4 sequences of 1024 tokens"):
        check_transition(given)


def test_documents_are_not_mixed_by_a_part_that_does_not_say_so(monkeypatch):
    class Shifting(lo.Projection):
        def forward(self, ctx):
            return lo.maps.Identity(), F.pad(ctx.e[:, :-1], (0, 0, 1, 0))

    monkeypatch.setitem(lo.PRESETS, "shifting", lambda w, s: loop_of(w, s, projection=Shifting()))
    check_transition(config(model={"loop": {"preset": "shifting"}}))
    with pytest.raises(ValueError, match="may be of another document"):
        check_transition(config(model={"loop": {"preset": "shifting"}}, data={"mask_attention": True}))


def test_the_gate_draws_nothing(presets):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    check_transition(config(model={"loop": {"preset": "recurrentgpt"}}))
    assert torch.equal(state, torch.get_rng_state())


def test_the_gate_takes_seconds_at_most():
    given = lo.load_config("paper/18/loop3-operloop")
    start = time.process_time()
    check_transition(given)
    assert time.process_time() - start < 60


def test_a_study_refuses_a_leak(presets, tmp_path):
    (tmp_path / "recipe.toml").write_text(config().to_toml())
    study = 'title = "t"\nbase = "recipe.toml"\ntokens = 2560\nseeds = [0]\nreference = "a"\n'
    study += '[variants.a]\npreset = "vanilla"\n[variants.b]\npreset = "peeking"\n'
    (tmp_path / "study.toml").write_text(study)
    with pytest.raises(ValueError, match="variant 'b' does not build: mine sees later tokens"):
        load_plan(tmp_path / "study.toml")
    (tmp_path / "study.toml").write_text(study + "noncausal = true\n")
    assert load_plan(tmp_path / "study.toml").config("b").model.loop.noncausal


def test_what_is_meant_to_see_the_future_says_so_everywhere(presets, tmp_path):
    given = config(model={"loop": {"preset": "peeking", "noncausal": True}}, steps=3)
    lo.train(given, tmp_path / "run", progress=False)
    page = packed(lo.report(tmp_path / "run").read_text())
    assert [group["name"] for group in page["groups"]] == ["run (noncausal)"]
    lo.evaluate(tmp_path / "run", tasks=["addition"], limit=4, quiet=True)
    lo.report(tmp_path / "run")
    assert "run (noncausal)" in (tmp_path / "run" / "report" / "tables.md").read_text()


def test_an_unmarked_recipe_has_the_name_it_had():
    assert "noncausal" not in config().model_dump(exclude_defaults=True)["model"]["loop"]


def test_a_run_is_not_resumed_by_other_code_and_says_so_when_it_is_opened(presets, tmp_path, monkeypatch, capsys):
    given = config(model={"loop": {"preset": "honest"}}, steps=3)
    monkeypatch.setitem(lo.PRESETS, "honest", lambda width, steps: loop_of(width, steps))
    lo.train(given, tmp_path / "run", progress=False)
    record = json.loads((tmp_path / "run" / "env.json").read_text())
    assert (record["code"], record["numerics"]) == (code_of("honest"), NUMERICS)
    for change, said in (
        ({"code": "other"}, "the code of honest has changed"),
        ({"numerics": 0}, "what looptim computes"),
    ):
        (tmp_path / "run" / "env.json").write_text(json.dumps(record | change))
        with pytest.raises(ValueError, match=f"{said}.* since .*undo that, or add --force"):
            lo.train(given, tmp_path / "run", resume=True, progress=False)
        capsys.readouterr()
        lo.load(tmp_path / "run")
        assert said in capsys.readouterr().err
        lo.train(given, tmp_path / "run", resume=True, force=True, progress=False)
        assert said in capsys.readouterr().err


def test_runs_of_a_study_are_known_by_their_code(monkeypatch):
    cell = Cell("a", 0, config())
    assert Cell("a", 0, config(), "one").name not in (cell.name, Cell("a", 0, config(), "two").name)
    assert cell.name == Cell("a", 0, config(), None).name
