"""Measurement: the error of number formats in the products of a model during training."""

from bitplan.analysis.measure.candidate import DEFAULT_CANDIDATES, Candidate
from bitplan.analysis.measure.measure import measure
from bitplan.analysis.measure.pass_metrics import register_metric
from bitplan.analysis.measure.result import Measurement, Row
from bitplan.analysis.measure.watch import Alarm, Watch

__all__ = ["DEFAULT_CANDIDATES", "Alarm", "Candidate", "Measurement", "Row", "Watch", "measure", "register_metric"]
