from __future__ import annotations

from collections.abc import Callable

import torch

from bitplan.analysis.memory.fit import LADDER, estimate_plans, free_memory
from bitplan.analysis.targets import Target
from bitplan.plans import preset_names

MakeTarget = Callable[[str], Target]


def test_each_step_of_the_ladder_keeps_less(make_target: MakeTarget) -> None:
    target = make_target("gpt")
    result = list(estimate_plans(target, LADDER, "packed", "sgd", None))
    kept = [choice.estimated.activations for choice in result]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    assert [choice.execution for choice in result] == ["emulate"] + ["packed"] * (len(LADDER) - 1)
    assert all(choice.fits is None for choice in result)
    assert set(LADDER[1:]) <= set(preset_names())


def test_a_budget_divides_what_fits_from_what_does_not(make_target: MakeTarget) -> None:
    target = make_target("gpt")
    plain, packed = estimate_plans(target, (None, "fp8-all"), "packed", "sgd", 2**50)
    assert plain.fits
    assert packed.fits
    exactly = plain.estimated.peak
    assert [next(estimate_plans(target, (None,), "packed", "sgd", most)).fits for most in (exactly, exactly - 1)] == [
        True,
        False,
    ]
    assert plain.to_dict()["estimated"]["peak"] == exactly


def test_a_machine_tells_what_is_free() -> None:
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 2**20
