import gc

import pytest
import torch

from bitplan.compiler.tracing import RaisedSetting

CONFIG = torch._dynamo.config


class Owner:
    pass


@pytest.fixture(autouse=True)
def _nobody_else_needs_anything() -> None:
    gc.collect()  # models that earlier tests threw away


def test_the_largest_need_holds_until_the_last_is_gone() -> None:
    before = CONFIG.recompile_limit
    first, second = Owner(), Owner()
    small, large = (
        RaisedSetting("recompile_limit", before + 3, first),
        RaisedSetting("recompile_limit", before + 7, second),
    )
    assert before + 7 == CONFIG.recompile_limit
    large.remove()
    assert before + 3 == CONFIG.recompile_limit
    large.remove()  # twice is once
    small.remove()
    assert before == CONFIG.recompile_limit


def test_less_than_there_is_changes_nothing() -> None:
    before = CONFIG.recompile_limit
    owner = Owner()
    need = RaisedSetting("recompile_limit", before - 1, owner)
    assert before == CONFIG.recompile_limit
    need.remove()
    assert before == CONFIG.recompile_limit


def test_what_somebody_else_set_meanwhile_is_left_alone() -> None:
    before = CONFIG.recompile_limit
    owner = Owner()
    need = RaisedSetting("recompile_limit", 2, owner)
    with CONFIG.patch(recompile_limit=before + 5):
        need.remove()
        assert before + 5 == CONFIG.recompile_limit
    assert before == CONFIG.recompile_limit


def test_an_owner_that_is_thrown_away_needs_nothing() -> None:
    before = CONFIG.fail_on_recompile_limit_hit
    owner = Owner()
    RaisedSetting("fail_on_recompile_limit_hit", True, owner)
    assert CONFIG.fail_on_recompile_limit_hit is True
    del owner
    gc.collect()
    assert CONFIG.fail_on_recompile_limit_hit is before
