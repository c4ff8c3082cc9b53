"""Recipes: layouts, files with a base, overrides, and one sentence for every mistake."""

import pytest
from support import RECIPES, config

import looptim as lo
from looptim.config import Config, ModelConfig, parse_layout
from looptim.rundir import difference


def test_the_number_of_loops_is_part_of_the_layout():
    config = ModelConfig.tiny(layout="1-2x2-1x4")
    assert config.with_loops(3).layout == "1-2x3-1x3"
    assert config.with_loops(3, at_most=True).layout == "1-2x2-1x3"


@pytest.mark.parametrize("layout", ["4-4x-2", "x3", "", "4--2", "a", "4-4x3-", "-1", "4*3", "4x3x2", " 4"])
def test_layouts_that_do_not_parse(layout):
    with pytest.raises(ValueError, match=r"does not parse at .* as in '4-4x3-2'"):
        parse_layout(layout)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layout": "0-0"}, "layout '0-0' has 0 unrolled blocks"),
        ({"layout": "1-9x99999999"}, "has 899999992 unrolled blocks; give at least 1 and at most 10,000"),
        ({"layout": "2", "head_dim": 2**63 - 1}, r"times heads \* head_dim .* makes a matrix of more"),
        ({"layout": "2", "vocab_size": 2**63 - 1}, "times vocab_size .* makes a matrix of more"),
        ({"layout": "2-0x3"}, "layout '2-0x3' loops nothing at '0x3'"),
        ({"layout": "2", "loop": {"preset": "operloop"}}, "has no looped segment, so loop.preset must be 'none'"),
        ({"layout": "2", "pattern": "SSX"}, "pattern 'SSX' must be letters S"),
        ({"layout": "2", "pattern": ""}, "pattern '' must be letters S"),
        ({"layout": "2", "heads": 6, "kv_heads": 4}, r"heads \(6\) must be a multiple of kv_heads \(4\)"),
        ({"layout": "2", "top_k": 300}, r"top_k \(300\) must not exceed the number of experts \(256\)"),
        ({"layout": "2", "full_rotary": 256}, r"full_rotary \(256\) must be even and at most head_dim \(128\)"),
        ({"layout": "2", "widht": 4}, "unknown key 'widht', did you mean 'width'"),
        ({"layout": "2", "width": "wide"}, "width: .* got 'wide'"),
        ({"layout": "2", "width": 0}, "width: .* got 0"),
        ({"layout": "2", "balance": "never"}, "balance: .* got 'never'"),
        ({"layout": "2", "loop": {"prest": "x"}}, "loop: unknown key 'prest', did you mean 'preset'"),
        ({"layout": "2x3"}, "has a looped segment, so loop.preset must name a transition"),
        ({}, "layout is missing"),
    ],
)
def test_a_mistake_gets_one_clear_sentence(values, message):
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig(**values)
    assert "\n" not in str(error.value)


def test_configs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        ModelConfig(layout="2").width = 3


def test_a_config_from_before_a_key_is_the_config_with_its_default():
    whole, tried = config(), []
    for table in Config.model_fields:
        for key, field in type(getattr(whole, table)).model_fields.items():
            values = whole.model_dump()
            if not field.is_required() and values[table][key] == field.get_default():
                del values[table][key]
                assert Config(**values) == whole, key
                assert difference(Config(**values), whole) == []
                tried.append(f"{table}.{key}")
    assert "data.mask_attention" in tried and len(tried) > 25
    changed = config(data={"mask_attention": True})
    assert difference(whole, changed) == ["data.mask_attention: False -> True"]


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=lambda p: str(p.relative_to(RECIPES)))
def test_every_recipe_loads_and_its_transition_builds(path):
    model = lo.load_config(path).model
    if model.loop.preset != "none":
        assert lo.build(model.loop.preset, width=64, steps=3, **model.loop.options).name == model.loop.preset


def test_a_recipe_stands_on_its_base_and_overrides_stand_on_both(tmp_path):
    (tmp_path / "base.toml").write_text(
        '[model]\nlayout = "2x3"\nwidth = 64\n[loop]\npreset = "operloop"\n[loop.options]\nstreams = 2\n'
    )
    (tmp_path / "same.toml").write_text('base = "base.toml"\n[model]\nwidth = 32\n')
    (tmp_path / "other.toml").write_text('base = "base.toml"\n[loop]\npreset = "vanilla"\n')
    same = lo.load_config(
        tmp_path / "same.toml", set=["model.top_k=4", "loop.options.shared=true", "model.pattern=SF"]
    ).model
    assert (same.width, same.top_k, same.pattern) == (32, 4, "SF")
    assert same.loop.options == {"streams": 2, "shared": True}
    # Options belong to a preset.
    assert lo.load_config(tmp_path / "other.toml").model.loop.options == {}
    changed = lo.load_config(tmp_path / "base.toml", set=["loop.preset=hyperloop", "loop.options.streams=3"]).model.loop
    # As the config itself calls it.
    inside = ["model.loop.preset=hyperloop", "model.loop.options.streams=3"]
    assert lo.load_config(tmp_path / "base.toml", set=inside).model.loop == changed
    assert (changed.preset, changed.options) == ("hyperloop", {"streams": 3})


def test_a_base_may_be_a_shipped_recipe_and_a_file_beside_comes_first(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "smoke"\n[model]\nwidth = 16\n')
    mine, smoke = lo.load_config(tmp_path / "mine.toml"), lo.load_config("smoke")
    assert mine.model.width == 16 and mine.train == smoke.train
    (tmp_path / "smoke").write_text('base = "nano"\n')
    assert lo.load_config(tmp_path / "mine.toml").train == lo.load_config("nano").train


def test_a_base_may_have_a_base_and_a_missing_one_names_the_file_that_asks_for_it(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "first.toml").write_text('[model]\nlayout = "2"\nwidth = 64\nheads = 8\nkv_heads = 2\n')
    (tmp_path / "second.toml").write_text('base = "inner/first.toml"\n[model]\nwidth = 32\nheads = 4\n')
    (tmp_path / "third.toml").write_text('base = "second.toml"\n[model]\nwidth = 16\n')
    model = lo.load_config(tmp_path / "third.toml").model
    assert (model.width, model.heads, model.kv_heads) == (16, 4, 2)
    (tmp_path / "inner" / "first.toml").unlink()
    with pytest.raises(ValueError, match=r"second\.toml: its base '.*first\.toml' does not exist"):
        lo.load_config(tmp_path / "third.toml")
    (tmp_path / "inner" / "first.toml").write_text('base = "../third.toml"')
    with pytest.raises(ValueError, match=r"first\.toml: its base '.*third\.toml' leads back to itself"):
        lo.load_config(tmp_path / "third.toml")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (None, [], "there is no recipe"),
        ("[model", [], "is not valid TOML"),
        ('base = "missing.toml"', [], r"recipe\.toml: its base '.*missing\.toml' does not exist"),
        ('[model]\nlayout = "2"\n[trane]\n', [], "unknown key 'trane', did you mean 'train'"),
        ('[model]\nlayout = "2"\n', ["width"], "must have the form key=value"),
        ('[model]\nlayout = "2"\n', ["model.width=x"], "model: width: .* got 'x'"),
        ('base = "recipe.toml"\n', [], "leads back to itself"),
    ],
)
def test_a_bad_recipe_is_refused_with_its_name(tmp_path, text, overrides, message):
    path = tmp_path / "recipe.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        lo.load_config(path, set=overrides)
    assert "\n" not in str(error.value)


def test_options_belong_to_their_preset_and_their_source(tmp_path):
    (tmp_path / "a.toml").write_text(
        '[model]\nlayout = "1-1x2-1"\n[loop]\npreset = "operloop"\noptions = { streams = 2 }\n'
        '[data]\nsource = "synthetic:addition"\ntokenizer = "bytes"\noptions = { digits = 3 }\n'
    )
    same = lo.load_config(tmp_path / "a.toml", set=["loop.preset=operloop", "data.source=synthetic:addition"])
    assert (same.model.loop.options, same.data.options) == ({"streams": 2}, {"digits": 3})
    other = lo.load_config(tmp_path / "a.toml", set=["loop.preset=hyperloop", "data.source=synthetic:hop"])
    assert (other.model.loop.options, other.data.options) == ({}, {})
    assert other.data.tokenizer == "bytes"


def test_the_order_of_overrides_does_not_matter(tmp_path):
    (tmp_path / "r.toml").write_text(
        '[model]\nlayout = "1-1x2-1"\n[loop]\npreset = "operloop"\noptions = {step = "unit"}\n'
    )
    changes = [
        "loop.options.streams=2",
        "loop.preset=hyperloop",
        "data.options.digits=3",
        "data.source=synthetic:addition",
    ]
    for order in (changes, changes[::-1]):
        config = lo.load_config(tmp_path / "r.toml", set=order)
        assert config.model.loop.options == {"streams": 2}
        assert config.data.options == {"digits": 3}


def test_a_layout_may_be_a_number(tmp_path):
    (tmp_path / "r.toml").write_text('[model]\nlayout = "1-1x2-1"\n')
    assert lo.load_config(tmp_path / "r.toml", set=["model.layout=4"]).model.layout == "4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = ["a.toml"]', r"base must be the path of another recipe, got \['a.toml'\]"),
        ('[lop]\npreset = "vanilla"', "unknown key 'lop', did you mean 'loop'"),
    ],
)
def test_what_only_a_recipe_has_is_known_too(tmp_path, text, message):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        lo.load_config(tmp_path / "r.toml")
    assert "\n" not in str(error.value)


def test_a_tracker_alone_is_a_list_of_one():
    assert lo.load_config("nano", set=["train.track=wandb"]).train.track == ("wandb",)
    assert lo.load_config("nano", set=['train.track=["wandb", "trackio"]']).train.track == ("wandb", "trackio")
    with pytest.raises(ValueError, match="track"):
        lo.load_config("nano", set=["train.track=wandbb"])


def test_read_outs_are_after_loops_that_there_are():
    assert lo.load_config("nano-adaptive", set=["train.loops.readouts=5"]).train.loops.readouts == 5
    for changes, message in (
        (["readouts=6"], r"readouts \(6\) must be less than the 6 loops of model\.layout \(1-1x6-1\)"),
        (["readout_prior=[1, 1, 1, 1, 1, 1]"], r"readout_prior has 6 weights, but model\.layout .* has 5 loops before"),
    ):
        with pytest.raises(ValueError, match=message):
            lo.load_config("nano-adaptive", set=[f"train.loops.{change}" for change in changes])
    # A random number of loops may be too small for what is asked; as many as there are must do.
    lo.load_config("nano-adaptive", set=["train.loops.readouts=6", "train.loops.scheme=huginn"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.lr=inf", "lr: input should be a finite number, got inf"),
        ("optim.weight_decay=nan", "weight_decay: input should be a finite number, got nan"),
        (f"train.seed={10**23}", "seed: input should be less than 9223372036854775808, got 1"),
        (f"train.data_seed={2**63}", "data_seed: input should be less than"),
    ],
)
def test_numbers_that_no_training_can_use_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        lo.load_config("nano", set=[change])
