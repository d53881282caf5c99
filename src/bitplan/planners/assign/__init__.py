"""Assignments: which tensors are stored in low precision, for a ratio or a memory budget (Lee, Sharma & Aiken 2023)."""

from bitplan.planners.assign.assign import AssignRequest, assign, choose_formats, make_assignment
from bitplan.planners.assign.assignment import BASELINES, Assignment
from bitplan.planners.assign.levels import FORMATS, ORDERS, Formats, Level

__all__ = [
    "BASELINES",
    "FORMATS",
    "ORDERS",
    "AssignRequest",
    "Assignment",
    "Formats",
    "Level",
    "assign",
    "choose_formats",
    "make_assignment",
]
