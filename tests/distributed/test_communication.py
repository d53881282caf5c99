"""What the collectives of a sharded model are given under a plan with ``communication:``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import layouts
import pytest
from layouts import Case, Outcome

import bitplan
from bitplan.cli import main
from bitplan.errors import PlanError

STOCHASTIC = {"format": "e5m2", "rounding": "stochastic"}
PLAIN = Case("fsdp", "delayed")
ROWS = Case("fsdp", "delayed", communication={"gather": "e4m3"}, policy="rows")
TENSOR = Case("fsdp", "delayed", communication={"gather": {"format": "e4m3", "scale": "tensor"}}, before=True)
BOTH = Case("fsdp", "delayed", communication={"gather": "e4m3", "reduce": STOCHASTIC}, policy="both")
FEEDBACK = Case("fsdp", "delayed", communication={"reduce": {**STOCHASTIC, "error_feedback": True}}, policy="feedback")
DDP = Case("ddp", "delayed", communication={"reduce": STOCHASTIC})
LATE = Case("ddp", "delayed", communication={"reduce": STOCHASTIC}, before=True)
GATHERS_NOTHING = Case("ddp", "delayed", communication={"gather": "e4m3"}, policy="gather")
CASES = [PLAIN, ROWS, TENSOR, BOTH, FEEDBACK, DDP, LATE, GATHERS_NOTHING]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("communication")
    outcomes = layouts.run_on_ranks(2, layouts.communicate, CASES, folder)
    return dict(zip((case.name for case in CASES), outcomes, strict=True))


def sent(results: dict[str, Any], case: Case, name: str) -> float:
    result = results[case.name]
    assert isinstance(result, Outcome), result
    return sum(count for key, count in result.bytes_sent.items() if name in key)


@pytest.mark.distributed
def test_bytes_on_the_wire(results: dict[str, Any]) -> None:
    assert sent(results, PLAIN, "gather") == pytest.approx(2 * 4)  # forward and backward, in float32
    for case in (ROWS, TENSOR, BOTH):
        assert 2 * 1.0 < sent(results, case, "gather") <= 2 * 1.01
    for case in (BOTH, FEEDBACK, DDP):
        assert 1.0 < sent(results, case, "all_to_all") <= 1.05
        assert sent(results, case, "reduce_scatter") == 0
    assert 1.0 < sent(results, DDP, "gather") <= 1.05  # the sum comes back


@pytest.mark.distributed
def test_losses_differ_and_stay_close(results: dict[str, Any]) -> None:
    for case in (ROWS, TENSOR, BOTH, FEEDBACK, DDP):
        losses, plain = results[case.name].losses, results[PLAIN.name].losses
        assert losses != plain
        assert losses == pytest.approx(plain, rel=0.02)


@pytest.mark.distributed
def test_communication_without_effect_raises(results: dict[str, Any]) -> None:
    assert results[LATE.name].startswith("PlanError")
    assert results[GATHERS_NOTHING.name].startswith("PlanError")


def test_a_plan_reads_and_writes_it() -> None:
    data = {"version": 1, "communication": {"gather": "e4m3", "reduce": STOCHASTIC}, "rules": []}
    plan = bitplan.Plan.from_dict(data)
    assert plan.to_dict() == data
    assert bitplan.Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.communication is not None
    assert plan.communication.reduce is not None
    assert plan.communication.reduce.block == 128
    assert plan.communication.reduce.bytes_of(1000) == 8 * 132


@pytest.mark.parametrize(
    "communication",
    [{"gather": "int8"}, {"gather": {"format": "e4m3", "scale": "block"}}, {"reduce": {"format": "e5m2", "block": 1}}],
)
def test_what_cannot_be_sent_is_refused(communication: Any) -> None:
    with pytest.raises(PlanError, match="communication"):
        bitplan.Plan.from_dict({"version": 1, "communication": communication, "rules": []})


def test_cost_counts_bytes_on_the_wire(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = bitplan.Plan.from_dict({"version": 1, "communication": {"gather": "e4m3", "reduce": STOCHASTIC}})
    plan.save(tmp_path / "plan.yaml")
    with pytest.raises(SystemExit):
        main(["cost", "resnet20", "--plan", str(tmp_path / "plan.yaml"), "--json"])
    wire = json.loads(capsys.readouterr().out)["wire"]
    assert 1.0 < wire["gathered"] / wire["parameters"] < 1.1  # rows of a small network are short
    assert 1.03 < wire["reduced"] / wire["parameters"] < 1.1
