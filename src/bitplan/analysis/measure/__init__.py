"""Measuring: what number formats do to the products of a model in training."""

from bitplan.analysis.measure.candidate import DEFAULT_CANDIDATES, Candidate
from bitplan.analysis.measure.measure import measure
from bitplan.analysis.measure.result import Measurement, Row
from bitplan.analysis.measure.watch import Alarm, Watch

__all__ = ["DEFAULT_CANDIDATES", "Alarm", "Candidate", "Measurement", "Row", "Watch", "measure"]
