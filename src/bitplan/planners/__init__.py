"""Planners: what makes plans for a model. They ask a model about its operations and never touch how it runs."""

from bitplan.planners.advise import Advice, advise, advise_on
from bitplan.planners.assign import assign
from bitplan.planners.cpt import cpt_plan
from bitplan.planners.range_test import RangeTest, range_test

__all__ = ["Advice", "RangeTest", "advise", "advise_on", "assign", "cpt_plan", "range_test"]
