"""What a training step holds in memory: predicted without running it, and measured."""

from bitplan.analysis.memory.estimate import of_run, predict_memory
from bitplan.analysis.memory.measure import kept_bytes, measure_memory
from bitplan.analysis.memory.step import Memory

__all__ = ["Memory", "kept_bytes", "measure_memory", "of_run", "predict_memory"]
