"""Memory of rows: maps from keys to row numbers, statistics, and marks of what changed."""
