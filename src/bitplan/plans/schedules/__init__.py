"""Precision over time: schedules give every step of a run its bits. Pure functions; no tensor is touched here."""

from bitplan.plans.schedules.base import FINE_STEPS, Position, RunPoint, Schedule, ScheduleSummary
from bitplan.plans.schedules.cyclic import TEN, Cyclic, Ramp
from bitplan.plans.schedules.named import SCHEDULE_NAMES, schedule, schedule_from_data
from bitplan.plans.schedules.piecewise import AtLeast, Deficit, Function, LateSwitch, Piecewise, Static, StepList

__all__ = [
    "FINE_STEPS",
    "SCHEDULE_NAMES",
    "TEN",
    "AtLeast",
    "Cyclic",
    "Deficit",
    "Function",
    "LateSwitch",
    "Piecewise",
    "Position",
    "Ramp",
    "RunPoint",
    "Schedule",
    "ScheduleSummary",
    "Static",
    "StepList",
    "schedule",
    "schedule_from_data",
]
