"""What a study's runs are called."""

import re

from support import config

from looptim.studies.archive import NAMES
from looptim.studies.spec import Cell


def test_a_key_that_looptim_gains_renames_no_run():
    # Recorded before there was data.mask_attention: a new key at its default must leave it as it is.
    assert Cell("operloop", 0, config()).name == "operloop_1-1x2-1_s0_cbab7430"
    assert Cell("operloop", 0, config(data={"mask_attention": False})).name == "operloop_1-1x2-1_s0_cbab7430"
    assert Cell("operloop", 0, config(data={"mask_attention": True})).name != "operloop_1-1x2-1_s0_cbab7430"


def test_a_preset_by_the_place_of_its_code_makes_the_name_of_one_folder():
    presets = [
        "my.py:mine",
        "my_py:mine",
        "a/my.py:mine",
        "/a/b/my.py:mine",
        "../my.py:mine",
        "a.b:mine",
        "..",
        "x" * 300,
    ]
    cells = [Cell("own", 0, config({"loop": {"preset": preset}})) for preset in presets]
    names = {cell.name for cell in cells}
    assert cells[0].name.startswith("my-mine_1-1x2-1_s0_")
    assert len(names) == len(presets), "the digest is of the whole"
    assert all(re.fullmatch(NAMES, f"{name}/config.toml") and len(name) < 120 for name in names)
