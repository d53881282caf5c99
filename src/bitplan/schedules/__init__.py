"""Precision over time: schedules give every step of a run its bits. Pure functions; no tensor is touched here."""

from bitplan.schedules.base import FINE_STEPS, Position, Schedule, ScheduleSummary
from bitplan.schedules.cyclic import TEN, Cyclic, Ramp
from bitplan.schedules.fixed import Deficit, Function, LateSwitch, Piecewise, Static, StepList
from bitplan.schedules.moments import Moment
from bitplan.schedules.named import SCHEDULE_NAMES, schedule, schedule_from_data

__all__ = [
    "FINE_STEPS",
    "SCHEDULE_NAMES",
    "TEN",
    "Cyclic",
    "Deficit",
    "Function",
    "LateSwitch",
    "Moment",
    "Piecewise",
    "Position",
    "Ramp",
    "Schedule",
    "ScheduleSummary",
    "Static",
    "StepList",
    "schedule",
    "schedule_from_data",
]
