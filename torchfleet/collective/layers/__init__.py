"""Layers sharded over ranks, and the collective operations they use."""
