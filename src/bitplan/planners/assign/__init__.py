"""Assignments: which tensors get a low precision under a ratio or a budget (Lee, Sharma & Aiken 2023)."""

from bitplan.planners.assign.assign import AssignRequest, assign, assignment, chosen_formats
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
    "assignment",
    "chosen_formats",
]
