"""torchfleet beside others on the same rows, seeds and model: `python -m benchmarks.peers --json`."""
