"""No change of the code may change a number: losses and weights of short runs, bit for bit as stored.

By default a sample runs; ``make goldens``, or BITPLAN_GOLDENS=all, runs every case. See make.py for how they were made.
"""

from __future__ import annotations

import os

import golden_store as store
import pytest
from golden_cases import CPU_PLANS, EXECUTIONS, MIDDLE, MODELS, Case, cpu_cases, eager_matrix, skip_reason, skipped
from golden_harness import initial_digests, train

RUNS_ALL = os.environ.get("BITPLAN_GOLDENS") == "all"
PATH = store.path_of()
#: Plans whose products no unit takes: they give each a lowest and a largest value.
ONLY_EMULATED = ("int8-minmax", "cpt-cr")


def in_sample(case: Case) -> bool:
    """All plans and executions on the two models that take the least time, and some of the others."""
    if case.compiler == "inductor":
        return case.id == "resnet-tiny/int8-minmax/emulate/inductor"
    if case.compiler == "aot_eager":
        return case.id in ("gpt/fp8-linear-delayed/emulate/aot_eager", "resnet/cpt-cr/emulate/aot_eager")
    if case.model in ("lstm", "graph"):
        return True
    return case.plan in ("fp8-linear-delayed", "promotion") or (case.plan, case.execution) in (
        ("fp8-all", "emulate"),
        ("stochastic", "native"),
        ("cpt-cr", "emulate"),
    )


def resumed_cases() -> list[Case]:
    """Resuming in the middle: one plan with a state of its own for each model, or all of them."""
    chosen = dict(zip(MODELS, ("fp8-linear-delayed", "cpt-cr", "stochastic", "promotion"), strict=True))
    return [
        Case(model, plan, "emulate", "eager")
        for model in MODELS
        for plan in CPU_PLANS
        if RUNS_ALL or chosen[model] == plan
    ]


@pytest.fixture(scope="module", autouse=True)
def _comparable() -> None:
    reason = store.why_not_comparable(PATH)
    if reason:
        pytest.skip(reason)


def expected(case: Case) -> dict[str, object]:
    cases = store.read(PATH)["cases"]
    assert case.id in cases, f"{case.id} is not stored in {PATH.name}: {store.HOW_TO_MAKE}"
    stored: dict[str, object] = cases[case.id]
    return stored


@pytest.mark.parametrize(
    "case", [case for case in cpu_cases() if RUNS_ALL or in_sample(case)], ids=lambda case: case.id
)
def test_losses_and_weights_are_those_stored(case: Case) -> None:
    result = train(case)
    different = store.difference(expected(case), result.stored())
    assert different is None, f"{case.id}: {different}"
    assert (result.promotions > 0) == (case.plan == "promotion")
    if case.execution == "native" and case.compiler == "eager":
        assert (result.native_products > 0) == (case.plan not in ONLY_EMULATED)


@pytest.mark.parametrize("case", resumed_cases(), ids=lambda case: case.id)
def test_a_resumed_run_has_the_same_losses_and_weights(case: Case) -> None:
    different = store.difference(expected(case), train(case, resume_at=MIDDLE).stored())
    assert different is None, f"{case.id}, resumed before step {MIDDLE}: {different}"


def test_initial_weights_and_batches_are_those_stored() -> None:
    stored = store.read(PATH)["initial"]
    drawn = initial_digests()
    assert drawn.keys() == stored.keys()
    assert [name for name in drawn if drawn[name] != stored[name]] == []


def test_the_stored_file_has_every_case_once_or_a_reason() -> None:
    stored = store.read(PATH)
    assert stored["skipped"] == skipped()
    assert set(stored["cases"]) == {case.id for case in cpu_cases()}
    matrix = {f"{model}/{plan}/{execution}/eager" for model in MODELS for plan in CPU_PLANS for execution in EXECUTIONS}
    assert matrix == {case.id for case in eager_matrix()}
    assert {case.id for case in eager_matrix() if skip_reason(case) is None} == matrix - set(skipped())


def test_packed_execution_has_the_numbers_of_emulation() -> None:
    """A property of the stored numbers themselves, so that they cannot be made from code that breaks it."""
    cases = store.read(PATH)["cases"]
    packed = [name for name in cases if name.endswith("/packed/eager")]
    assert packed
    for name in packed:
        assert cases[name] == cases[name.replace("/packed/", "/emulate/")], name
