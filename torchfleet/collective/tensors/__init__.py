"""Tensors and parts of them: what a rank holds of a tensor, and what it says of the whole."""
