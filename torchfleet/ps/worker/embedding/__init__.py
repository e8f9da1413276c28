"""The embedding modules: their arguments, their settings, and torch's own embeddings converted to them."""
