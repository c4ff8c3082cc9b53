"""Suites and tasks by name, and what is said of unknown ones."""

import pytest

from looptim.evaluation.suites import FOLDERS, ROWS, SHOTS, SUITES, choose


def test_the_suites_are_the_paper_s_groups():
    assert SUITES["ppl"] == ("wikitext", "lambada_openai")
    assert len(SUITES["commonsense"]) == len(SUITES["generation"]) == 6
    assert set(SUITES["paper"]) == {*SUITES["ppl"], *SUITES["commonsense"], *SUITES["generation"]}
    assert SUITES["reasoning"] == ("addition", "hop", "chain", "state")
    assert set(SHOTS) == set(FOLDERS) == {row.task for row in ROWS}


@pytest.mark.parametrize(
    ("suite", "tasks", "message"),
    [
        ("papr", None, "unknown suite 'papr', did you mean 'paper'?"),
        (None, None, "nothing to evaluate; give a suite"),
        (None, [], "the list of tasks is empty"),
        ("ppl", ["wikitex"], "task 'wikitex' is not in the suite 'ppl', did you mean 'wikitext'?"),
    ],
)
def test_mistakes_are_one_sentence(suite, tasks, message):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        choose(suite, tasks)
    assert message in str(caught.value)


def test_tasks_narrow_a_suite_and_may_be_any_of_lm_eval():
    assert choose("paper", ["piqa", "piqa"]) == ("piqa",)
    assert choose(None, ["boolq"]) == ("boolq",)
