"""Measuring: what number formats do to the products of a model in training."""

from bitplan.measure.alarm import Alarm
from bitplan.measure.candidate import DEFAULT_CANDIDATES, Candidate
from bitplan.measure.measure import measure
from bitplan.measure.result import Measurement, Row
from bitplan.measure.watch import Watch

__all__ = ["DEFAULT_CANDIDATES", "Alarm", "Candidate", "Measurement", "Row", "Watch", "measure"]
