"""The doctor passes on a machine that works, names what does not, and its page has every check."""

import re

import pytest
import torch
from support import REPO, run

from looptim.model.attention import visible
from looptim.training import doctor


@pytest.mark.long
def test_this_machine_passes():
    done = run("doctor", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [re.match(r"(ok  |skip)  ([a-z ]+): .", line)[2] for line in lines] == list(doctor.CHECKS)
    assert sum(line.startswith("ok ") for line in lines) >= 8


def test_what_fails_is_named_and_does_not_stop_the_others(monkeypatch):
    def breaks():
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(doctor, "CHECKS", {"attention": breaks, "versions": doctor.versions})
    broken, versions = doctor.examine()
    assert broken == ("attention", False, "RuntimeError: no kernel")
    assert versions.ok and "looptim" in versions.said


def test_the_page_has_every_check_in_order():
    rows = re.findall(r"^\| `([a-z ]+)` \|", (REPO / "docs" / "gpu.md").read_text(), re.M)
    assert rows == list(doctor.CHECKS)


def test_mask_functions_of_flex_attention_eagerly():
    starts = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 4, 4]])
    for window in (None, 2):
        seen = visible(window, starts)
        for batch in range(2):
            for query in range(6):
                for key in range(6):
                    wanted = starts[batch, query] <= key <= query and (window is None or key > query - window)
                    assert bool(seen(torch.tensor(batch), 0, torch.tensor(query), torch.tensor(key))) == bool(wanted)
