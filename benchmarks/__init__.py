"""Benchmarks, which are not part of the wheel: bitplan and every installed peer, measured in one run on one machine."""
