"""Hybrid mode: asynchronous rows on the servers, and a network trained synchronously by torch.distributed."""
