"""Faults under training, on real processes: `python -m benchmarks.chaos`."""
