"""What a saved run holds, and which runs may go on from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitplan.errors import PlanError
from bitplan.plans import Plan
from bitplan.runtime.checkpoint_state import RunState
from bitplan.runtime.clock import ScheduleClock

MOVING = Plan.from_dict(
    {
        "version": 1,
        "rules": [{"match": "*", "activation": {"until": "50%", "use": "e4m3", "then": "e3m2"}}],
    }
)
STILL = Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]})


def saved(plan: Plan = MOVING, **others: Any) -> RunState:
    facts: dict[str, Any] = {
        "step": 3,
        "seed": 7,
        "plan": plan.flattened().to_dict(),
        "formats": {"0": ["e4m3"]},
        "records": {"0": ({"linear.0:activation": 0}, torch.ones(1, 2))},
        "steps": [[["e4m3"], 2, [0]], [["e3m2"], 1, [1]]],
        "total": 10,
        "phase": (1,),
        "position": [3, 10],
    }
    return RunState(**{**facts, **others})


def test_it_is_a_dictionary_of_plain_values_and_back() -> None:
    state = saved().to_dict()
    assert list(state) == ["step", "seed", "plan", "formats", "records", "steps", "total", "phase", "position"]
    assert state["phase"] == [1]
    assert RunState.from_dict(state) == saved(records=state["records"])


def test_a_state_of_an_older_version_lacks_what_it_did_not_know() -> None:
    state = saved(STILL).to_dict()
    for name in ("total", "phase", "position"):
        del state[name]
    run_state = RunState.from_dict(state)
    assert (run_state.total, run_state.phase, run_state.position) == (None, (), None)


@pytest.mark.parametrize("state", [None, [], {}, {"step": 1, "seed": 0, "plan": {}, "formats": {}, "records": {}}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(PlanError, match="not the state of an attached plan"):
        RunState.from_dict(state)


def test_it_names_every_phase_that_it_speaks_of() -> None:
    assert list(saved().phases) == [(1,), (0,), (1,)]


def test_it_belongs_to_a_plan_and_to_the_length_of_a_run_that_the_plan_depends_on() -> None:
    saved().require_plan(MOVING, ScheduleClock(MOVING, 10, fixed=False))
    with pytest.raises(PlanError, match=r"steps=10, .* attach with the same steps="):
        saved().require_plan(MOVING, ScheduleClock(MOVING, 11, fixed=False))
    with pytest.raises(PlanError, match="belongs to another plan"):
        saved().require_plan(STILL, ScheduleClock(STILL, 10, fixed=False))
    saved(STILL).require_plan(STILL, ScheduleClock(STILL, None, fixed=False))


def test_it_belongs_to_a_run_with_as_many_formats_that_may_change() -> None:
    state, row = saved(), object()
    fitting: dict[str, Any] = {"0": [row], "1": []}
    state.require_rows(fitting)
    misfits: tuple[dict[str, Any], ...] = ({"0": []}, {"0": [row, row]}, {"1": [row]})
    for misfit in misfits:
        with pytest.raises(PlanError, match="other mutable formats"):
            state.require_rows({**fitting, **misfit})
