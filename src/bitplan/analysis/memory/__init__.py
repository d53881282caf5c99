"""The memory of a training step: estimated without running it, and measured."""

from bitplan.analysis.memory.estimate import estimate_memory, estimate_run_memory
from bitplan.analysis.memory.measure import measure_memory
from bitplan.analysis.memory.step import Memory, RunMemory

__all__ = ["Memory", "RunMemory", "estimate_memory", "estimate_run_memory", "measure_memory"]
