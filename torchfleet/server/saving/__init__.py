"""A model to files and back, and where servers may write."""
