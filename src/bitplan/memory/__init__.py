"""What a training step holds in memory: predicted without running it, and measured."""

from bitplan.memory.account import Memory
from bitplan.memory.kept import kept_bytes
from bitplan.memory.measure import measure_memory
from bitplan.memory.of_run import of_run
from bitplan.memory.predict import predict_memory

__all__ = ["Memory", "kept_bytes", "measure_memory", "of_run", "predict_memory"]
