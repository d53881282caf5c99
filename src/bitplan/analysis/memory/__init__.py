"""What a training step holds in memory: estimated without running it, and measured."""

from bitplan.analysis.memory.estimate import estimate_memory, of_run
from bitplan.analysis.memory.measure import kept_bytes, measure_memory
from bitplan.analysis.memory.step import Memory, RunMemory

__all__ = ["Memory", "RunMemory", "estimate_memory", "kept_bytes", "measure_memory", "of_run"]
