"""The averages of appendix D against the paper's own tables."""

import pytest
from support import PAPER_TABLES

from looptim.evaluation.averages import EM, LL, averages, overall, scores
from looptim.evaluation.suites import ROWS

PAPER = PAPER_TABLES

TOLERANCE = 0.01 + 1e-9
"""Rows and averages are printed to 0.01: half of it from the rows, half from the average."""


def printed():
    for table, content in PAPER.items():
        for column, (rows, means) in content["columns"].items():
            for name, value in zip(content["averages"], means, strict=True):
                yield table, column, name, dict(zip(content["rows"], rows, strict=True)), value


@pytest.mark.parametrize(
    ("table", "column", "name", "rows", "value"), list(printed()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_printed_average_follows_from_its_printed_rows(table, column, name, rows, value):
    ours = averages(rows)
    if name == "Overall":
        # "The mean of the two reported group averages": of the printed ones.
        _, means = PAPER[table]["columns"][column]
        ours[name] = overall(means[0], means[1])
    follows = abs(ours[name] - value) <= TOLERANCE
    assert follows, f"{table}, {column}: {name} is printed as {value}, its rows give {ours[name]:.3f}"


def test_all_eight_columns_of_the_main_table_are_there():
    assert len(PAPER["main"]["columns"]) == 8
    assert set(PAPER["main"]["rows"]) == {row.name for row in ROWS}


@pytest.mark.parametrize("table", ["alignment", "loops"])
def test_printed_gains_are_differences_of_printed_averages(table):
    columns = PAPER[table]["columns"]
    for name, (other, gain) in PAPER[table]["gains"].items():
        assert columns[name][1][0] - columns[other][1][0] == pytest.approx(gain, abs=1e-9)


def test_an_average_of_an_incomplete_group_is_none():
    rows = dict.fromkeys((*LL, *EM[:-1]), 50.0)
    assert averages(rows) == {
        "LL Avg.": 50.0,
        "EM Avg.": None,
        "Overall": None,
        "EM Avg. (flexible)": None,
        "Overall (flexible)": None,
    }


def test_both_filters_of_gsm8k_have_an_average():
    results = {
        "gsm8k": {"exact_match,strict-match": 0.1, "exact_match,flexible-extract": 0.4},
        "gsm8k_cot": {"exact_match,strict-match": 0.1, "exact_match,flexible-extract": 0.4},
        "humaneval": {"pass@1,create_test": 0.1, "pass@1_stderr,create_test": 0.02},
        "humaneval_plus": {"pass@1,create_test": 0.1},
        "mmlu_generative": {"exact_match,get_response": 0.1},
        "bbh_cot_fewshot": {"exact_match,get-answer": 0.1},
    }
    table = scores(results)
    assert table["humaneval"] == (10.0, 2.0)
    means = averages({name: value for name, (value, _) in table.items()})
    assert means["EM Avg."] == pytest.approx(10.0)
    assert means["EM Avg. (flexible)"] == pytest.approx(20.0)


def test_perplexities_are_no_percentages():
    assert scores({"wikitext": {"word_perplexity,none": 13.5}}) == {"wikitext_ppl": (13.5, None)}
