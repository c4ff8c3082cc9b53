"""Reports: what is read, what is drawn, what the page says, and that nothing is half written."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from support import config, packed

import looptim
from looptim.reporting.plots import draw, smooth
from looptim.reporting.report import report
from looptim.reporting.style import COLORS, color_of, style_of, styles_of
from looptim.rundir import RunDir


def line(step, **values):
    return {"step": step, "tokens": step * 1000, **values}


def write_run(folder, lines, preset="operloop", tail="", seed=0):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines) + tail)
    (folder / "config.toml").write_text(f'[loop]\npreset = "{preset}"\n[train]\nseed = {seed}\nnote = "<b>&"\n')
    (folder / "env.json").write_text('{"torch": "2.13"}')
    return folder


def looped(loops=3, steps=60):
    for step in range(1, steps + 1):
        loss = 2 + 3 / step
        load = {"blocks.1.feedforward": [1 + 1 / step] * loops, "blocks.3.feedforward": [1.5]}
        yield line(
            step, loss=loss, lr=1e-3, grad_norm=1 / step, tokens_per_s=500.0, mfu=0.4, moe_load=load, moe_load_max=1.5
        )
        if step % 20 == 0:
            lists = {key: [0.5] * loops for key in ("step_size", "decay", "objective")}
            yield line(step, valid_loss=loss + 0.1, state_norm=[10.0**i for i in range(loops + 1)], **lists)


SMALL = [line(1, loss=3.0), line(2, loss=2.0), line(2, valid_loss=2.5)]
ALL = {"loss", "loss_end", "lr", "grad_norm", "moe_load", "step_size", "decay", "state_norm", "objective"}


@pytest.mark.long
def test_one_run(tmp_path):
    folder = write_run(tmp_path / "nano", looped(), tail='{"step": 61, "tok')
    page = report([folder])
    assert page == folder / "report" / "index.html"
    assert {path.name for path in page.parent.iterdir()} == {f"{n}.{kind}" for n in ALL for kind in ("png", "svg")} | {
        "index.html"
    }
    data = packed(page.read_text())
    assert data["charts"][0]["key"] == "loss" and {chart["key"] for chart in data["charts"]} == ALL - {"loss_end"}
    assert "url(" not in page.read_text() and "@import" not in page.read_text()
    (numbers,) = data["tables"]
    cells = {row[0]["text"]: row[1]["text"] for row in numbers["rows"]}
    # 60 steps of 1000 tokens at 500 tokens/s.
    expected = {"tokens": "60,000", "final training loss": "2.0504", "final validation loss": "2.1500"}
    expected |= {"tokens/s, median": "500", "MFU, median": "40.0%", "training time": "2 min 00 s"}
    assert expected.items() <= cells.items() and cells["transition"] == "operloop"
    assert 'note = "<b>&"' in data["files"][0]["text"] and "<b>&" not in page.read_text()
    png = (page.parent / "loss.png").read_bytes()
    assert int.from_bytes(png[16:20], "big") == 840, "5.6 inches at 150 dpi"


@pytest.mark.long
def test_several_runs(tmp_path):
    folders = [
        write_run(tmp_path / "a" / "x", looped()),
        write_run(tmp_path / "b" / "x", SMALL, preset="vanilla", seed=1),
        write_run(tmp_path / "none", SMALL, preset="none", seed=1),
    ]
    with pytest.raises(
        ValueError, match=r"a report of 3 runs needs a folder of its own; give one with out \(--out DIR\)"
    ):
        report(folders)
    data = packed(report(folders, tmp_path / "out").read_text())
    table = next(table for table in data["tables"] if table["title"] == "What differs in the configs")
    assert [cell["text"] for cell in table["header"]] == ["", "a/x", "b/x", f"{tmp_path.name}/none"]
    assert [[cell["text"] for cell in row] for row in table["rows"]] == [
        ["loop.preset", "operloop", "vanilla", "none"],
        ["train.seed", "0", "1", "1"],
    ]
    assert len({(group["color"], str(group["dash"])) for group in data["groups"]}) == 3


def test_the_same_run_gives_the_same_bytes_and_stale_figures_go(tmp_path):
    folder = write_run(tmp_path / "nano", SMALL)
    page = report([folder])
    before = {path.name: path.read_bytes() for path in page.parent.iterdir()}
    (page.parent / "decay.png").write_bytes(b"of an earlier report")
    (page.parent / "mine.txt").write_text("not ours")
    report(folder)
    after = {path.name: path.read_bytes() for path in page.parent.iterdir()}
    assert after.pop("mine.txt") == b"not ours" and after == before


@pytest.mark.parametrize("existing", [True, False])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, existing):
    folder, out = write_run(tmp_path / "nano", SMALL), tmp_path / "out"
    if existing:
        report([folder], out)
    before = {path.name: path.read_bytes() for path in out.iterdir()} if existing else None
    whole = Path.write_bytes

    def write(path, data):
        if path.name == "index.html":
            whole(path, data[:10])
            raise OSError(28, "No space left on device")
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(ValueError, match=r"cannot write the report to .*No space left on device"):
        report([folder], out)
    assert ({path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else None) == before


def test_out_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match=r"cannot write the report to .*out: "):
        report([write_run(tmp_path / "nano", SMALL)], tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"step": 1, "tokens": 5}\nnonsense\n{"step": 2, "tokens": 6}\n', r"line 2: it is not JSON, got 'nonsense'"),
        ("nonsense\n", r"line 1: it is not JSON"),
        ("\n[1]\n", r"line 2: metrics must be an object"),
        ('{"loss": 2.0}\n', r"line 1: a line needs the numbers 'step' and 'tokens'"),
        ('{"step": 1, "tokens": 5, "loss": "low"}\n', r"line 1: 'loss' must be a number"),
        ('{"step": 1, "tokens": 5, "mine": ["low"]}\n', r"line 1: 'mine' must be a number, a list of numbers, or"),
        ('{"step": 1, "tokens": 5, "mine": {"b": 1}}\n', r"line 1: 'mine' .* or a mapping of names to lists"),
        ("", r"has no metrics yet; wait"),
        ('{"step": 1, "tok', r"has no metrics yet; wait"),
    ],
)
def test_metrics_that_do_not_read(tmp_path, content, message):
    folder = write_run(tmp_path / "nano", [], tail=content)
    with pytest.raises(ValueError, match=message) as error:
        report([folder])
    assert "\n" not in str(error.value) and not (folder / "report").exists()


def test_folders_that_are_no_runs(tmp_path):
    folder = write_run(tmp_path / "nano", SMALL)
    with pytest.raises(ValueError, match="there is no run directory"):
        report([tmp_path / "absent"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not a run, it has no metrics\.jsonl"):
        report([tmp_path / "empty"])
    with pytest.raises(ValueError, match="is given twice"):
        report([folder, folder / ".." / "nano"], tmp_path / "out")
    with pytest.raises(ValueError, match="at least one run"):
        report([])
    (folder / "config.toml").write_text("x = ")
    with pytest.raises(ValueError, match=r"config\.toml is not valid TOML"):
        report([folder])
    (folder / "config.toml").unlink()
    assert RunDir(folder).read().preset == "nano"
    (folder / "metrics.jsonl").unlink()
    (folder / "config.toml").write_text("")
    with pytest.raises(ValueError, match="has no metrics yet"):
        report([folder])


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    lines = [line(1, loss=3.0), line(2, loss=2.0), line(2, valid_loss=2.5), line(3, loss=9.0), line(2, loss=1.0)]
    run = RunDir(write_run(tmp_path / "nano", lines)).read()
    tokens, loss = run.column("loss")
    assert tokens.tolist() == [1000, 2000] and loss.tolist() == [3.0, 1.0]
    assert not len(run.column("valid_loss")[1])


def test_lists_of_different_lengths_and_missing_numbers(tmp_path):
    lines = [line(1, loss=None, decay=[0.1]), line(2, loss=math.nan, decay=[0.1, 0.2]), line(3, decay=[])]
    run = RunDir(write_run(tmp_path / "nano", lines)).read()
    tokens, decay = run.columns("decay")
    assert tokens.tolist() == [1000, 2000] and decay.shape == (2, 2) and math.isnan(decay[0, 1])
    assert [picture.name for picture in draw([run])] == ["decay"]
    data = packed(report([tmp_path / "nano"]).read_text())
    assert data["tables"][0]["rows"][3][1]["text"] == "nan"
    loops = {line["part"]: line["y"] for line in data["charts"][-1]["lines"]}
    assert loops == {"loop 1": [0.1, 0.1], "loop 2": [None, 0.2]}


@pytest.mark.parametrize("lines", [[line(1, loss=3.0)], [line(5, valid_loss=3.0)], [line(1)], [line(0, loss=math.inf)]])
def test_the_shortest_runs(tmp_path, lines):
    assert report([write_run(tmp_path / "nano", lines)]).is_file()


def test_every_figure_has_named_axes_and_one_line_per_loop(tmp_path):
    runs = [RunDir(write_run(tmp_path / name, looped(loops))).read() for name, loops in (("two", 2), ("four", 4))]
    pictures = {picture.name: picture for picture in draw(runs)}
    assert set(pictures) == ALL
    for picture in pictures.values():
        shown = [axes for axes in picture.figure.axes if axes.get_visible()]
        assert shown[-1].get_xlabel() == "training tokens" and shown[0].get_ylabel() and picture.caption
    panels = pictures["state_norm"].figure.axes
    assert [len(axes.lines) for axes in panels] == [3, 5] and panels[0].get_yscale() == "log"
    labels = [text.get_text() for text in pictures["state_norm"].figure.legends[0].get_texts()]
    assert labels == ["start", "loop 1", "loop 2", "loop 3", "loop 4"]


def test_the_loss_is_in_nats_and_bits_beside_the_text_that_was_written(tmp_path):
    lines = [line(1, loss=3.0), line(2, loss=2.0), line(2, valid_loss=2.5)]
    folder = write_run(tmp_path / "nano", lines)
    (folder / "env.json").write_text(json.dumps({"data": {"valid_tokens": 100, "valid_bytes": 400}}))
    sample = {"step": 2, "tokens": 2000, "prompt": "1+", "text": "</script>"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + '\n{"step": 3')
    text = report([folder]).read_text()
    data = packed(text)
    assert data["groups"][0]["bits"] == pytest.approx(100 / 400 / math.log(2))
    assert ["bits per byte", f"{2.5 / 4 / math.log(2):.4f}"] in [
        [cell["text"] for cell in row] for row in data["tables"][0]["rows"]
    ]
    texts = [{key: sample[key] for key in ("step", "tokens", "text")}]
    assert data["samples"] == [{"group": 0, "prompt": "1+", "texts": texts}]
    assert text.count("</script>") == 2, "the data's and the code's"
    (folder / "samples.jsonl").write_text('{"step": 2, "tokens": 1}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl line 1: a sample needs the numbers"):
        report([folder])


def test_an_equation_of_a_shipped_transition_and_no_code_of_others(tmp_path):
    mine = write_run(tmp_path / "mine", SMALL)
    text = config(model={"loop": {"preset": "operloop"}}).to_toml()
    (mine / "config.toml").write_text(text)
    assert [each["name"] for each in packed(report(mine).read_text())["equations"]] == ["operloop"]
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    (mine / "config.toml").write_text(text.replace('"operloop"', f'"{tmp_path}/evil.py:loop"'))
    assert packed(report(mine).read_text())["equations"] == []
    assert not (tmp_path / "executed").exists()


def test_equations_of_one_name_say_whose_they_are(tmp_path):
    runs = []
    for name, options in (("first", {}), ("second", {"step_init": 0.3}), ("third", {"shared": True})):
        runs.append(write_run(tmp_path / name, SMALL))
        (runs[-1] / "config.toml").write_text(
            config(model={"loop": {"preset": "operloop", "options": options}}).to_toml()
        )
    found = packed(report(runs, tmp_path / "out").read_text())["equations"]
    assert [each["of"] for each in found] == [["first", "second"], ["third"]]
    assert packed(report(runs[:2], tmp_path / "out").read_text())["equations"][0]["of"] == []


def test_a_report_follows_runs_until_they_are_done(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "nano", [line(1, loss=3.0)])
    recipe = (folder / "config.toml").read_text().replace("[train]", "[train]\nsteps = 3")
    (folder / "config.toml").write_text(recipe)
    (folder / "metrics.jsonl").rename(tmp_path / "later")
    pages = []

    def train_on(seconds):
        """The run logs a step while the report sleeps."""
        page = folder / "report" / "index.html"
        pages.append(packed(page.read_text()) if page.is_file() else None)
        if pages[-1] is None:
            (tmp_path / "later").rename(folder / "metrics.jsonl")
        else:
            RunDir(folder).metrics.append(line(len(pages), loss=2.0))

    monkeypatch.setattr("time.sleep", train_on)
    page = report(folder, watch=5)
    assert [each and (each["watch"], len(each["charts"][0]["lines"][0]["x"])) for each in pages] == [
        None,
        (5, 1),
        (5, 2),
    ]
    assert packed(page.read_text())["watch"] is None and (page.parent / "loss.png").is_file()
    with pytest.raises(ValueError, match="more than none; got 0"):
        report(folder, watch=0)


def test_smoothing_keeps_constants_and_skips_nan():
    values = np.full(200, 3.0)
    values[50] = math.nan
    np.testing.assert_allclose(smooth(values), 3.0)
    assert smooth(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_every_preset_has_a_color_of_its_own():
    names = [name for name in looptim.PRESETS if not name.endswith("_aligned")]
    assert set(names) <= set(COLORS), "give a new preset a color"
    for family in ([n for n in names if not n.startswith("operloop_")], [n for n in names if n.startswith("operloop")]):
        assert len({color_of(name) for name in family}) == len(family)
    for name in (name for name in looptim.PRESETS if name.endswith("_aligned")):
        twin, sibling = style_of(name), style_of(name.removesuffix("_aligned"))
        assert twin["color"] == sibling["color"]
        assert twin["linestyle"] != sibling["linestyle"] and twin["marker"] != sibling["marker"]
    assert re.fullmatch("#[0-9a-f]{6}", color_of("my_own")) and color_of("my_own") == color_of("my_own")


def test_no_two_lines_of_a_figure_look_the_same():
    names = [name for name in looptim.PRESETS if not name.startswith("operloop_")] + ["operloop"] * 3
    for presets in (list(looptim.PRESETS), names, ["operloop"] * 6):
        styles = styles_of(presets)
        assert len({str(style) for style in styles}) == len(presets)


def test_runs_of_one_transition_differ_in_shade_and_dash(tmp_path):
    runs = [RunDir(write_run(tmp_path / f"seed{seed}", SMALL, seed=seed)).read() for seed in range(3)]
    styles = styles_of([run.preset for run in runs])
    assert styles[0]["color"] == color_of("operloop")
    assert len({str(style["color"]) for style in styles}) == len({str(style["linestyle"]) for style in styles}) == 3
