"""Executions of a plan: emulate (rounded values), packed (saved tensors really small) and native (FP8/INT8 units)."""
