"""Trainings on 2 and 4 processes have the numbers of one process that goes through the same micro-batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
from layouts import Case, Outcome

pytestmark = pytest.mark.distributed

ALL = [
    Case("ddp", "int8-minmax"),
    Case("ddp", "delayed", before=True),
    Case("fsdp", "fp8-all"),
    Case("fsdp", "fp8-all", "packed", before=True),
    Case("fsdp", "int8-minmax", before=True),
    Case("fsdp", "int8-linear", "native"),
    Case("fsdp", "int8-linear", "native", before=True, reshard=False),
    Case("fsdp", "delayed", "packed"),
    Case("fsdp", "stochastic weights", before=True),
    Case("fsdp", "consumer"),
    Case("fsdp", "promotion", "packed"),
    Case("fsdp", "fp8-linear", policy="offload"),
]
#: In float64, where the order of sums changes no rounded value.
SPLIT = [
    Case("tp", "fp8-linear", dtype="float64"),
    Case("tp", "delayed", "packed", before=True, dtype="float64"),
    Case("tp", "promotion", dtype="float64"),
    Case("sp", "int8-linear", "packed", before=True, dtype="float64"),
    Case("sp", "int8-minmax", dtype="float64"),
    Case("sp", "stochastic weights", "native", dtype="float64"),
]
FOUR = [
    Case("fsdp", "fp8-all"),
    Case("hsdp", "int8-minmax", before=True),
    Case("hsdp", "delayed", "packed", reshard=False),
    Case("fsdp x tp", "delayed", dtype="float64"),
    Case("fsdp x sp", "int8-linear", "packed", dtype="float64"),
]
MIXED = [Case("fsdp", "fp8-all", policy="mixed"), Case("fsdp", "fp8-all", policy="mixed alone")]
REFUSED = Case("tp", "int8-minmax")


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(2, [*ALL, *SPLIT, *MIXED, REFUSED], tmp_path_factory)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(4, FOUR, tmp_path_factory)


def results_of(world: int, cases: list[Case], folders: pytest.TempPathFactory) -> dict[str, Any]:
    folder = folders.mktemp(f"world{world}")
    results = layouts.run_on_ranks(world, layouts.run_case, cases, folder)
    return dict(zip((case.name for case in cases), results, strict=True))


@cache
def reference(plan: str, execution: str, dtype: str, parts: int) -> Outcome:
    return layouts.reference(Case("", plan, execution, dtype=dtype), parts)


def assert_same_run(actual: Any, case: Case, parts: int) -> None:
    assert isinstance(actual, Outcome), actual
    execution = "emulate" if case.dtype == "float64" else case.execution  # products of shards are emulated
    expected = reference(case.plan, execution, case.dtype, parts)
    assert actual.losses == pytest.approx(expected.losses, rel=0 if case.dtype == "float32" else 1e-12)
    for weight, other in zip(actual.weights, expected.weights, strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-6 if case.dtype == "float32" else 1e-12)
    assert actual.promotions == expected.promotions
    assert actual.is_plain


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_two_processes(case: Case, on_two: dict[str, Any]) -> None:
    assert_same_run(on_two[case.name], case, 2)


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_two_processes_with_split_tensors(case: Case, on_two: dict[str, Any]) -> None:
    assert_same_run(on_two[case.name], case, 1)


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_four_processes(case: Case, on_four: dict[str, Any]) -> None:
    assert_same_run(on_four[case.name], case, 2 if " x " in case.layout else 4)


def test_plans_differ(on_two: dict[str, Any]) -> None:
    losses = {tuple(on_two[case.name].losses) for case in ALL if case.execution != "native"}
    assert len(losses) == len({case.plan for case in ALL if case.execution != "native"})


def test_promotions_are_decided_together(on_two: dict[str, Any]) -> None:
    assert on_two[Case("fsdp", "promotion", "packed").name].promotions


def test_mixed_precision_has_the_numbers_of_one_process(on_two: dict[str, Any]) -> None:
    together, alone = (on_two[case.name] for case in MIXED)
    assert together.losses == alone.losses


def test_statistics_are_those_of_all_processes(on_two: dict[str, Any]) -> None:
    stats = [on_two[Case("fsdp", "int8-minmax", before=True).name].stats, on_two[Case("ddp", "int8-minmax").name].stats]
    assert stats[0] == stats[1]
    for site, (amax, _, _) in reference("int8-minmax", "emulate", "float32", 2).stats.items():
        assert amax <= stats[0][site][0] * (1 + 1e-6)  # with micro-batches, statistics are those of the last one


def test_random_bits_of_a_tensor_that_may_be_split_are_refused(on_two: dict[str, Any]) -> None:
    assert on_two[REFUSED.name].startswith("PlanError")
    assert "use_local_output=False" in on_two[REFUSED.name]


def test_checkpoints_move_between_numbers_of_processes(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    (after,) = layouts.run_on_ranks(4, layouts.save_in_the_middle, [folder], tmp_path)
    assert isinstance(after, list), after
    (on_two,) = layouts.run_on_ranks(2, layouts.go_on, [folder], tmp_path)
    assert on_two == pytest.approx(after, rel=1e-6)
    (alone,) = layouts.run_on_ranks(1, layouts.go_on_alone, [folder], tmp_path)
    on_one, message = alone
    assert on_one == pytest.approx(after, rel=1e-6)
    assert "example=" in message
