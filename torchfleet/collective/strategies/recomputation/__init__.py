"""recompute: activations that are computed again, or kept in host memory."""
