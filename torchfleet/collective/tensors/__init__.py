"""Tensors and shards: what a rank holds of a tensor, and how it describes the whole."""
