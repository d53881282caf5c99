"""Assignments: which tensors get a low precision under a ratio or a budget (Lee, Sharma & Aiken 2023)."""

from bitplan.planners.assign.assign import Asked, assign, assignment, chosen_formats
from bitplan.planners.assign.assignment import Assignment
from bitplan.planners.assign.baselines import BASELINES
from bitplan.planners.assign.levels import FORMATS, Formats, Level
from bitplan.planners.assign.orders import ORDERS

__all__ = [
    "BASELINES",
    "FORMATS",
    "ORDERS",
    "Asked",
    "Assignment",
    "Formats",
    "Level",
    "assign",
    "assignment",
    "chosen_formats",
]
