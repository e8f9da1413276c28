"""sharding: optimizer state, gradients and parameters cut over ranks."""
