"""Planners: functions that make plans for a model from its recorded operations, its memory or measured errors."""

from bitplan.planners.advise import Advice, advise, advise_on
from bitplan.planners.assign import assign
from bitplan.planners.auto import AutoResult, auto
from bitplan.planners.cpt import cpt_plan
from bitplan.planners.diagnose import Diagnosis
from bitplan.planners.range_test import RangeTest, range_test
from bitplan.planners.registry import register_planner
from bitplan.planners.watch import Watch

__all__ = [
    "Advice",
    "AutoResult",
    "Diagnosis",
    "RangeTest",
    "Watch",
    "advise",
    "advise_on",
    "assign",
    "auto",
    "cpt_plan",
    "range_test",
    "register_planner",
]
