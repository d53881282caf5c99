"""Planners: what makes plans for a model. They ask a model about its operations and never touch how it runs."""

from bitplan.planners.cpt import cpt_plan

__all__ = ["cpt_plan"]
