"""Saved models: docs/checkpoints.md."""
