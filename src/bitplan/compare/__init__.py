"""Comparisons: one task under several plans and seeds, each run in a folder of its own."""

from bitplan.compare.choice import Choice
from bitplan.compare.compare import compare
from bitplan.compare.jobs import Job, Update
from bitplan.compare.suites import SUITES, Suite, find_suite

__all__ = ["SUITES", "Choice", "Job", "Suite", "Update", "compare", "find_suite"]
