"""What a study's runs are called."""

from support import config

from looptim.studies.spec import Cell


def test_a_key_that_looptim_gains_renames_no_run():
    # Recorded before there was data.mask_attention: a new key at its default must leave it as it is.
    assert Cell("operloop", 0, config()).name == "operloop_1-1x2-1_s0_cbab7430"
    assert Cell("operloop", 0, config(data={"mask_attention": False})).name == "operloop_1-1x2-1_s0_cbab7430"
    assert Cell("operloop", 0, config(data={"mask_attention": True})).name != "operloop_1-1x2-1_s0_cbab7430"
