"""The page of a report, as a reader sees it in a real browser: the loss first, read off, zoomed, switched, smoothed."""

import json
import math

import numpy as np
import pytest
from support import config

from looptim.reporting.charts import run_page
from looptim.reporting.plots import smooth
from looptim.reporting.report import report
from looptim.reporting.runs import read_runs

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=alert(1)>\u202eevil"
LOSSES = [3 + math.sin(step) / 4 + 20 / step for step in range(1, 201)]


def write_run(folder, preset, *, shift=0.0, steps=200):
    """A run as training leaves it, of which the numbers are known."""
    folder.mkdir(parents=True)
    lines = [
        {"step": i, "tokens": 100 * i, "loss": loss + shift, "lr": 0.1, "grad_norm": 1 / i}
        for i, loss in enumerate(LOSSES[:steps], 1)
    ]
    lines += [{"step": 200, "tokens": 20000, "valid_loss": 3.25 + shift, "state_norm": [1.0, 2.0, 4.0]}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text(config(model={"loop": {"preset": preset}}, steps=200).to_toml())
    (folder / "env.json").write_text(json.dumps({"data": {"valid_tokens": 1, "valid_bytes": 2}}))
    sample = {"step": 200, "tokens": 20000, "prompt": "1+", "text": HOSTILE}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return folder


@pytest.fixture
def page_file(tmp_path):
    folders = [write_run(tmp_path / "first", "operloop"), write_run(tmp_path / "second", "vanilla", shift=0.5)]
    return report(folders, tmp_path / "out")


def loss(page):
    return page.locator("figure[data-chart=loss]")


def values(page, chart="loss"):
    """What stands below a chart, by the names of its lines."""
    both = "all => all.map(item => [item.querySelector('bdi').textContent, item.querySelector('b').textContent])"
    return dict(page.locator(f"figure[data-chart={chart}] .item").evaluate_all(both))


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_is_the_loss(page_file, open_page, width, scheme):
    page = open_page(page_file, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = loss(page).locator("canvas").bounding_box()
    assert box["y"] + box["height"] < 900 and box["width"] > 0.75 * width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
    assert dark == (scheme == "dark")
    assert "Y′ = (1 − ηλ) Y − η G" in page.locator(".equation").first.inner_text()
    assert page.locator("figure[data-chart]").count() == 4


def test_figures_follow_the_dark_mode(page_file, open_page):
    page = open_page(page_file)

    def brightest():
        """Of the pixels of the figure, which has no background of its own: ink on light paper, light on dark."""
        return page.evaluate(
            "() => { const c = document.querySelector('canvas'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; let sum = 0, n = 0; for (let i = 0; i < d.length; i += 4)"
            " if (d[i + 3] > 200) { sum += d[i] + d[i + 1] + d[i + 2]; n++; } return sum / n; }"
        )

    light = brightest()
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(200)
    assert brightest() > light + 100


def test_values_are_read_off_by_mouse_and_keyboard(page_file, open_page):
    page = open_page(page_file)
    page.get_by_label("smoothing").select_option("0")
    assert values(page)["first, training"] == f"{LOSSES[-1]:.4f}" and values(page)["first, validation"] == "3.2500"
    assert "bits/byte" in loss(page).locator(".readout").inner_text()
    loss(page).locator(".area").focus()
    page.keyboard.press("Home")
    assert values(page)["second, training"] == f"{LOSSES[0] + 0.5:.4f}"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert values(page)["first, training"] == f"{LOSSES[4]:.4f}"
    # One cursor for all charts.
    assert values(page, "grad_norm")["first"] == "0.2"
    over = loss(page).locator(".u-over").bounding_box()
    page.mouse.move(over["x"] + over["width"] / 2, over["y"] + 30)
    assert values(page)["first, training"] in [f"{value:.4f}" for value in LOSSES[98:103]]


def test_runs_smoothing_and_units_are_chosen(page_file, open_page):
    page = open_page(page_file)
    expected = smooth(np.array(LOSSES))
    assert values(page)["first, training"] == f"{expected[-1]:.4f}", "as the static figures are smoothed"
    page.get_by_label("loss in", exact=True).select_option("bits")
    assert values(page)["first, validation"] == f"{3.25 / 2 / math.log(2):.4f}"
    assert "bits per byte" in loss(page).locator("h3").inner_text()
    page.get_by_role("checkbox", name="second").uncheck()
    assert set(values(page)) == {"training", "validation"} and page.locator(".samples td").count() == 1
    page.get_by_label("charts per loop show", exact=True).select_option(label="second")
    assert values(page, "state_norm") == {"start": "1", "loop 1": "2", "loop 2": "4"}


def test_zoom(page_file, open_page):
    page = open_page(page_file)
    over = loss(page).locator(".u-over").bounding_box()
    page.mouse.move(over["x"] + 0.5 * over["width"], over["y"] + 30)
    page.mouse.down()
    page.mouse.move(over["x"] + 0.75 * over["width"], over["y"] + 30, steps=3)
    page.mouse.up()
    assert page.get_by_label("show", exact=True).input_value() == ""
    page.get_by_label("smoothing").select_option("0")
    loss(page).locator(".area").focus()
    page.keyboard.press("Home")
    assert values(page)["first, training"] in [f"{value:.4f}" for value in LOSSES[97:103]]
    page.keyboard.press("Escape")
    assert page.get_by_label("show", exact=True).input_value() == "1"
    page.get_by_label("show", exact=True).select_option("0.2")
    loss(page).locator(".area").focus()
    page.keyboard.press("Home")
    assert values(page)["first, training"] == f"{LOSSES[159]:.4f}"


def test_hostile_text_is_shown_and_does_nothing(page_file, open_page):
    page = open_page(page_file)
    assert page.evaluate("window.hacked") is None and page.locator("img").count() == 0
    shown = page.locator(".samples td").first.inner_text()
    assert shown == "1+" + HOSTILE.replace("\u202e", "⟨202E⟩")


def test_a_page_that_is_watched_follows_and_remembers(tmp_path, open_page):
    folders = [write_run(tmp_path / "first", "operloop", steps=100), write_run(tmp_path / "second", "vanilla")]
    file = tmp_path / "index.html"
    file.write_text(run_page(folders, read_runs(folders), [], watch=2).html())
    page = open_page(file)
    page.get_by_label("smoothing").select_option("0")
    page.get_by_role("checkbox", name="second").uncheck()
    page.get_by_text(f"{LOSSES[99]:.4f}", exact=True).wait_for()
    # The page of runs that are done follows no longer, and still knows what was chosen.
    done = [write_run(tmp_path / "later" / "first", "operloop"), folders[1]]
    file.write_text(run_page(done, read_runs(done), []).html())
    page.get_by_text(f"{LOSSES[-1]:.4f}", exact=True).wait_for()
    assert not page.get_by_role("checkbox", name="second").is_checked()
    assert page.get_by_label("smoothing").input_value() == "0"
