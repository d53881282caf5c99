"""Benchmarks: ours and every installed peer in one run, on one machine, as ratios to a plain copy."""
