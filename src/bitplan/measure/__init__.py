"""Measuring: what number formats do to the products of a model in training."""

from bitplan.measure.candidate import DEFAULT_CANDIDATES, Candidate
from bitplan.measure.measure import measure
from bitplan.measure.result import Measurement, Row

__all__ = ["DEFAULT_CANDIDATES", "Candidate", "Measurement", "Row", "measure"]
