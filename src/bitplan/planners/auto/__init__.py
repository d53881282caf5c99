"""The search for a plan: :func:`auto` takes limits for memory, time and loss, and returns a measured, verified plan."""

from bitplan.planners.auto.result import AutoResult, TriedPlan
from bitplan.planners.auto.search import Limits, auto, search
from bitplan.planners.auto.trials import LocalTrials, Problem, ProcessTrials

__all__ = ["AutoResult", "Limits", "LocalTrials", "Problem", "ProcessTrials", "TriedPlan", "auto", "search"]
