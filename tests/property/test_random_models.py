"""A sample of random models under random plans; ``python tests/property/run.py`` checks thousands."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from model_checks import Failure, check, compare
from random_models import Case, Statement, draw, source
from shrinking import outcome_of, report, shrink
from statements import CALLS, KINDS

#: How many cases, and the seed of the first: more for a long run.
CASES = int(os.environ.get("BITPLAN_RANDOM_MODELS", "40"))
FIRST = int(os.environ.get("BITPLAN_RANDOM_MODELS_SEED", "0"))


def outcome(case: Case, compiled: str | None = None) -> str:
    result, message = outcome_of(case, compiled)
    if result == "FAILED":
        pytest.fail(report(shrink(case, compiled, message, seconds=20), message))
    return result


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_eager_packed_and_detached_models_have_the_numbers_by_hand() -> None:
    outcomes = Counter(outcome(draw(FIRST + number)) for number in range(CASES))
    assert outcomes["checked"] > 0.4 * CASES, outcomes


def test_compiled_models_have_the_numbers_of_eager_ones() -> None:
    seeds = iter(range(FIRST + 100, FIRST + 200))
    checked = 0
    while checked < max(2, CASES // 20):
        case = draw(next(seeds))
        checked += not case.is_reentrant and outcome(case, "aot_eager") == "checked"


def test_a_seed_always_draws_the_same_case_and_every_kind_is_drawn() -> None:
    assert source(draw(7)) == source(draw(7))
    assert draw(7).rules == draw(7).rules
    kinds = {statement.kind for seed in range(400) for statement in draw(seed).statements}
    assert kinds == {*KINDS, *CALLS}


BODY = (Statement("linear", "x", "x", "v1", 1), Statement("tanh", "v1", "v1", "v2", 2))


def test_inductor_has_the_numbers_of_eager_ones() -> None:
    case = Case(BODY, (), (), ("v2",), ({"match": "*", "x": "e4m3", "grad_activation": "e5m2"},))
    assert check(case, "inductor") == "checked"


# --- The checks can fail


def test_another_plan_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(BODY, (), (), ("v2",), ({"match": "*", "activation": "e4m3"},))
    assert check(case) == "checked"
    monkeypatch.setattr("bitplan.runtime.rounding_op.RoundingOp.round", lambda self, x, *rest: x)
    with pytest.raises(Failure, match="without a plan"):
        check(case)


def test_a_rule_without_effect_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(BODY, (), (), ("v2",), ({"match": "*", "op": "relu", "activation": "e4m3"},))
    assert check(case) == "a rule without effect"
    monkeypatch.setattr("bitplan.runtime.coverage.RuleCoverage._why_without_effect", lambda *rest: None)
    with pytest.raises(Failure, match="was accepted"):
        check(case)


def test_one_bit_is_noticed() -> None:
    numbers = [{"output 0": torch.tensor([1.0, torch.nan])}]
    compare("equal", numbers, [{"output 0": torch.tensor([1.0, torch.nan])}])
    with pytest.raises(Failure, match="differs by"):
        compare("other", numbers, [{"output 0": torch.tensor([1.0 + 2**-23, torch.nan])}])
