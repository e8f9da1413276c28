"""sharding: optimizer state, gradients and parameters sharded over ranks."""
