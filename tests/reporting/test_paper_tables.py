"""The paper's tables: made from results on disc, they are printed like the paper's."""

import csv
import io
import json
import math

import pytest
from support import PAPER_TABLES

from looptim.evaluation.averages import averages
from looptim.evaluation.suites import ROWS
from looptim.reporting.paper_tables import (
    Column,
    main_table,
    mark,
    read_columns,
    split_scales,
    tables,
    tables_of,
)
from looptim.reporting.tables import Cell, Table, csv_text, html_text, latex, markdown

PAPER = PAPER_TABLES
BASE = {"layout": "18", "preset": "none", "options": {}, "loops": None, "parameters": 1000, "flops_per_token": 1e6}


def model(preset, loops=3, **options):
    if preset == "none":
        return BASE
    flops = 1e6 * (loops + 3) / 6
    return BASE | {"preset": preset, "options": options, "loops": loops, "parameters": 556, "flops_per_token": flops}


def column(name, rows, values, **of):
    scores = dict(zip(rows, values, strict=True))
    means = {key: value for key, value in averages(scores).items() if value is not None}
    return Column(name, model(**of), {key: (value, None) for key, value in (scores | means).items()})


def paper_columns():
    content = PAPER["main"]
    return [
        column(name, content["rows"], rows, preset="none" if name.startswith("Base") else name.split()[0].lower())
        for name, (rows, _) in content["columns"].items()
    ]


def test_the_main_table_marks_what_the_paper_marks():
    columns = paper_columns()
    table = main_table(split_scales(columns))
    names = table.header[2:]
    start = {row.name: row for row in ROWS}
    by_row = {}
    for row in table.rows[2:]:
        for name, candidate in start.items():
            if row[1] == candidate.label and (candidate.group == "PPL") == (row[0] == "PPL ↓") and row[0] != "flexible":
                by_row[name] = row[2:]
    assert len(by_row) == len(ROWS)
    for kind in ("bold", "underline"):
        for scale, expected in PAPER["main"][kind].items():
            for row, winner in expected.items():
                marked = [
                    n for n, c in zip(names, by_row[row], strict=True) if c.mark == kind and n.endswith(f" {scale}")
                ]
                assert marked == [f"{winner} {scale}"], (row, kind)


def test_a_model_that_diverged_takes_no_mark():
    columns = [column(name, [], [], preset="operloop") for name in "abc"]
    cells = mark([Cell(math.nan), Cell(2.0), Cell(1.0)], columns, lower=True)
    assert [cell.mark for cell in cells] == [None, "underline", "bold"]


def test_ratios_are_of_the_baseline_of_each_scale():
    table = main_table(split_scales(paper_columns()))
    assert [cell.form.format(cell.value) for cell in table.rows[0][2:6]] == ["1.00×", "0.56×", "0.56×", "0.56×"]


def test_alignment_loops_and_ablations_come_with_the_models_that_make_them():
    content = PAPER["alignment"]
    presets = ["none", "parcae", "parcae_aligned", "hyperloop", "hyperloop_aligned"]
    columns = [
        column(name, content["rows"], rows, preset=preset)
        for (name, (rows, _)), preset in zip(content["columns"].items(), presets, strict=True)
    ]
    made = {table.name: table for table in tables(columns)}
    assert set(made) == {"main", "alignment"}
    gains = {row[0]: row[-1].value for row in made["alignment"].rows}
    assert gains["Parcae (Aligned)"] == pytest.approx(0.15, abs=0.01)
    assert gains["HyperLoop (Aligned)"] == pytest.approx(0.54, abs=0.01)
    assert gains["Parcae"] is None

    content = PAPER["loops"]
    kinds = [("none", 3), ("hyperloop", 3), ("operloop", 3), ("hyperloop", 6), ("operloop", 6)]
    columns = [
        column(name, content["rows"], rows, preset=preset, loops=loops)
        for (name, (rows, _)), (preset, loops) in zip(content["columns"].items(), kinds, strict=True)
    ]
    made = {table.name: table for table in tables(columns)}
    assert set(made) == {"main", "loops"}
    assert {row[0]: row[-1].value for row in made["loops"].rows}["OperLoop (Loop 6)"] == pytest.approx(8.01, abs=0.01)

    columns = [column("full", [], [], preset="operloop"), column("less", [], [], preset="operloop", step="unit")]
    ablations = {table.name: table for table in tables(columns)}["ablations"]
    assert [row[1:3] for row in ablations.rows] == [["✓", "Causal"], ["✓", "×"]]


def write(run, task, results, *, limit=None, loops=None, weights="w", samples=None, **of):
    suffix = ("" if loops is None else f".loops{loops}") + ("" if limit is None else f".limit{limit}")
    described = model(**of) if loops is None else model(loops=loops, **of)
    settings = {"model": described | {"weights": weights}, "limit": limit}
    file = run / "eval" / f"{task}{suffix}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    number = {task: samples or limit or 1000}
    file.write_text(
        json.dumps({"task": task, "settings": settings, "results": results, "samples": number, "notes": []})
    )


def test_runs_become_columns_and_files(tmp_path):
    base, run = tmp_path / "base_1", tmp_path / "run_1"
    write(base, "piqa", {"acc_norm,none": 0.7, "acc_norm_stderr,none": 0.01}, preset="none")
    write(run, "piqa", {"acc_norm,none": 0.5}, preset="operloop", limit=20)
    write(run, "piqa", {"acc_norm,none": 0.75625, "acc_norm_stderr,none": 0.01}, preset="operloop")
    write(run, "arc_easy", {"acc_norm,none": 0.25}, preset="operloop", limit=20)
    write(run, "addition", {"exact_match,none": 0.5, "exact_match_stderr,none": 0.1}, preset="operloop")
    write(run, "piqa", {"acc_norm,none": 0.8}, preset="operloop", loops=6)
    made = tables_of([base, run])
    text = markdown(made)
    assert "| Category | Dataset | base_1 | run_1 | run_1, 6 loops |" in text
    assert "| Com.Sen. LL ↑ | PIQA<sub>n</sub> | 70.00 ± 1.00 | <u>75.62</u> ± 1.00 | **80.00** |" in text
    # Not of piqa, which was evaluated as a whole too.
    assert "run_1: only the first 20 problems of arc_easy\n" in text.replace("  \n", "\n")
    assert "| addition exact_match | – | 50.00 ± 10.00 | – |" in text
    assert "PIQA$_{\\mathrm{n}}$ & 70.00 {\\scriptsize $\\pm$1.00} & \\underline{75.62}" in latex(made)
    assert "\\textbf{run\\_1}" in latex(made)
    rows = list(csv.DictReader(io.StringIO(csv_text(made))))
    assert {
        "table": "main",
        "row": "Com.Sen. LL ↑ / PIQA_n",
        "column": "run_1",
        "value": "75.625",
        "stderr": "1.0",
        "mark": "underline",
    } in rows


def test_results_of_earlier_weights_are_left_out(tmp_path):
    write(tmp_path, "piqa", {"acc_norm,none": 0.5}, preset="operloop", weights="old")
    write(tmp_path, "arc_easy", {"acc_norm,none": 0.5}, preset="operloop", weights="new")
    (only,) = read_columns(tmp_path)
    assert set(only.scores) == {"arc_e"}
    assert only.notes == [f"{tmp_path.name}: left out, of other weights than the newest result: piqa"]


def test_columns_of_other_weights_say_so(tmp_path):
    write(tmp_path, "piqa", {"acc_norm,none": 0.5}, preset="operloop", weights="old")
    write(tmp_path, "piqa", {"acc_norm,none": 0.6}, preset="operloop", weights="new", loops=6)
    before, after = read_columns(tmp_path)
    assert before.notes == [f"{tmp_path.name}: of other weights than the newest result"] and not after.notes


def test_a_task_of_ours_is_whole_with_the_problems_it_has(tmp_path):
    write(tmp_path, "addition", {"exact_match,none": 0.5}, preset="operloop", samples=200)
    write(tmp_path, "addition", {"exact_match,none": 0.25}, preset="operloop", limit=500)
    (more,) = read_columns(tmp_path)
    assert more.scores["addition exact_match"][0] == 25 and not more.notes
    write(tmp_path / "some", "addition", {"exact_match,none": 0.5}, preset="operloop", limit=20)
    (few,) = read_columns(tmp_path / "some")
    assert few.notes == ["some: only the first 20 problems of addition"]


def test_loops_are_numbers_and_a_twin_has_as_many(tmp_path):
    tasks = {row.task: row.metric for row in ROWS if row.group == "LL"}
    for preset, loops, value in (
        ("parcae", 6, 0.4),
        ("parcae", 12, 0.5),
        ("parcae_aligned", 6, 0.6),
        ("parcae_aligned", 12, 0.7),
    ):
        for task, metric in tasks.items():
            write(tmp_path / preset, task, {metric: value}, preset=preset, loops=loops)
    columns = [column for preset in ("parcae", "parcae_aligned") for column in read_columns(tmp_path / preset)]
    assert [column.name for column in columns[:2]] == ["parcae, 6 loops", "parcae, 12 loops"]
    made = {table.name: table for table in tables(columns)}
    assert [row[-1].value for row in made["alignment"].rows[2:]] == pytest.approx([20.0, 20.0])


def test_other_tasks_alone_make_one_table_and_a_lower_perplexity_is_better(tmp_path):
    for name, value in (("a", 10.0), ("b", 20.0)):
        write(
            tmp_path / name, "c4", {"word_perplexity,none": value, "acc,none": value / 100}, preset="vanilla", limit=3
        )
    text = markdown(tables_of([tmp_path / "a", tmp_path / "b"]))
    assert "Main results" not in text
    assert "| c4 word_perplexity | **10.00** | <u>20.00</u> |" in text
    assert "| c4 acc | <u>10.00</u> | **20.00** |" in text
    assert "a: only the first 3 problems of c4" in text


def test_latex_has_rules_between_categories_only():
    columns = [column("full", [], [], preset="operloop"), column("less", [], [], preset="operloop", step="unit")]
    (ablations,) = tables(columns)
    assert latex([ablations]).count("\\midrule") == 1


def test_html_escapes_and_marks():
    table = Table("t", "A < B", ["Task", "run"], [["PIQA_n", Cell(1.5, 0.25, "bold")], ["x", Cell(None)]], ["a & b"])
    text = html_text([table])
    assert "<h2>A &lt; B</h2>" in text
    assert "<th>PIQA<sub>n</sub></th><td><b>1.50</b> ± 0.25</td>" in text
    assert "<td>–</td>" in text
    assert "a &amp; b" in text


def test_no_results_are_no_tables_and_a_broken_one_is_one_sentence(tmp_path):
    assert tables_of([tmp_path]) == []
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "x.json").write_text("{")
    with pytest.raises(ValueError, match="is not a result of `looptim evaluate`"):
        read_columns(tmp_path)
