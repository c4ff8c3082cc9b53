"""The rows of the paper's results tables: the stock task of lm-eval that fills each, its metric and its shots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..base.choices import nearest
from ..data import TASKS


class Row(NamedTuple):
    """One row of the main results table."""

    name: str
    label: str
    """The label as the paper prints it; `_` begins a subscript and `^` a superscript."""
    task: str
    """The stock task of lm-eval."""
    metric: str
    """The key of its result."""
    group: Literal["PPL", "LL", "EM"]
    category: str = ""

    @property
    def lower_is_better(self) -> bool:
        """Whether it is a perplexity; everything else is a share, printed as a percentage."""
        return self.group == "PPL"


ROWS = (
    Row("wikitext_ppl", "Wikitext", "wikitext", "word_perplexity,none", "PPL"),
    Row("lambada_ppl", "Lambada", "lambada_openai", "perplexity,none", "PPL"),
    Row("lambada", "Lambada", "lambada_openai", "acc,none", "LL", "Com.Sen."),
    Row("arc_c", "ARCc_n", "arc_challenge", "acc_norm,none", "LL", "Com.Sen."),
    Row("arc_e", "ARCe_n", "arc_easy", "acc_norm,none", "LL", "Com.Sen."),
    Row("hellaswag", "HellaSwag_n", "hellaswag", "acc_norm,none", "LL", "Com.Sen."),
    Row("winogrande", "WinoGrande", "winogrande", "acc,none", "LL", "Com.Sen."),
    Row("piqa", "PIQA_n", "piqa", "acc_norm,none", "LL", "Com.Sen."),
    Row("gsm8k", "GSM8K_5shot", "gsm8k", "exact_match,strict-match", "EM", "Math"),
    Row("gsm8k_cot", "GSM8K_8shot^*", "gsm8k_cot", "exact_match,strict-match", "EM", "Math"),
    Row("humaneval", "H.Eval_0shot", "humaneval", "pass@1,create_test", "EM", "Code"),
    Row("humaneval_plus", "H.Eval+_0shot", "humaneval_plus", "pass@1,create_test", "EM", "Code"),
    Row("mmlu", "MMLU_5shot", "mmlu_generative", "exact_match,get_response", "EM", "Reason."),
    Row("bbh", "BBH_3shot^*", "bbh_cot_fewshot", "exact_match,get-answer", "EM", "Reason."),
)
"""The paper's rows in its order. It does not say which filter of GSM8K it reports: `FLEXIBLE` is the other one."""

FLEXIBLE = tuple(
    row._replace(name=f"{row.name}_flexible", metric="exact_match,flexible-extract")
    for row in ROWS
    if row.task in ("gsm8k", "gsm8k_cot")
)

SHOTS = {
    "wikitext": 0,
    "lambada_openai": 0,
    "arc_challenge": 0,
    "arc_easy": 0,
    "hellaswag": 0,
    "winogrande": 0,
    "piqa": 0,
    "gsm8k": 5,
    "gsm8k_cot": 8,
    "humaneval": 0,
    "humaneval_plus": 0,
    "mmlu_generative": 5,
    "bbh_cot_fewshot": 3,
}
"""The paper's few-shot numbers, which are the tasks' own but for MMLU. Any other task keeps its own."""

FOLDERS = {
    "wikitext": "wikitext",
    "lambada_openai": "lambada",
    "arc_challenge": "arc",
    "arc_easy": "arc",
    "hellaswag": "hellaswag",
    "winogrande": "winogrande",
    "piqa": "piqa",
    "gsm8k": "gsm8k",
    "gsm8k_cot": "gsm8k",
    "humaneval": "humaneval",
    "humaneval_plus": "humaneval",
    "mmlu_generative": "mmlu/generative",
    "bbh_cot_fewshot": "bbh/cot_fewshot",
}
"""Where lm-eval keeps these tasks; reading these folders is fast, while the whole index takes nine seconds."""

CODE = {"humaneval": "openai/openai_humaneval", "humaneval_plus": "evalplus/humanevalplus"}
"""Tasks that execute code written by the model, and their data sets."""


def _tasks(*groups: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.task for row in ROWS if row.group in groups))


SUITES: dict[str, tuple[str, ...]] = {
    "paper": _tasks("PPL", "LL", "EM"),
    "commonsense": _tasks("LL"),
    "generation": _tasks("EM"),
    "ppl": _tasks("PPL"),
    "reasoning": tuple(TASKS),
}
"""Suites by name; `reasoning` consists of our synthetic tasks, the others of stock tasks of lm-eval."""


def choose(suite: str | None, tasks: Sequence[str] | None) -> tuple[str, ...]:
    """The tasks of a suite, of a list, or those in both if both are given.

    >>> choose("ppl", None)
    ('wikitext', 'lambada_openai')
    """
    if suite is not None and suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}{nearest(suite, SUITES)} known: {', '.join(SUITES)}")
    if tasks is None:
        if suite is None:
            raise ValueError(f"nothing to evaluate; give a suite ({', '.join(SUITES)}) or tasks")
        return SUITES[suite]
    chosen = tuple(dict.fromkeys([tasks] if isinstance(tasks, str) else tasks))
    if not chosen:
        raise ValueError("the list of tasks is empty; give at least one, or a suite")
    if suite is not None:
        for task in chosen:
            if task not in SUITES[suite]:
                hint = nearest(task, SUITES[suite])
                raise ValueError(f"task {task!r} is not in the suite {suite!r}{hint} it has {', '.join(SUITES[suite])}")
    return chosen


def refusal(code: Sequence[str]) -> str:
    """Refuse tasks that execute code, unless that was allowed."""
    return (
        f"{' and '.join(code)} would execute what the model writes; permit it with --allow-code "
        "(allow_code=True), or name the other tasks"
    )
