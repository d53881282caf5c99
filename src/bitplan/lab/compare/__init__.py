"""Comparisons: one task under several plans and seeds, each run in a folder of its own."""

from bitplan.lab.compare.compare import compare
from bitplan.lab.compare.folder import Choice
from bitplan.lab.compare.suite_options import SuiteOptions
from bitplan.lab.compare.suites import SUITES, Suite, find_suite
from bitplan.lab.compare.workers import Job, Update

__all__ = ["SUITES", "Choice", "Job", "Suite", "SuiteOptions", "Update", "compare", "find_suite"]
