"""Embeddings, and how the lookups of a step become one pull per server."""
