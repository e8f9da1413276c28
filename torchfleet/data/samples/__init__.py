"""Samples in memory: slots, rows and batches."""
