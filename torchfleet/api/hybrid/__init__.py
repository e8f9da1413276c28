"""Hybrid mode: rows on the servers, asynchronous; the network synchronous among the workers, by torch.distributed."""
