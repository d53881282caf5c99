"""Advice: a format for every operand of every product, from measured errors, with reasons."""

from bitplan.planners.advise.advise import UNSEEN, Advice, advise, advise_on

__all__ = ["UNSEEN", "Advice", "advise", "advise_on"]
