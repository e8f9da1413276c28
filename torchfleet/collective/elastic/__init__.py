"""Ranks that are replaced while the others go on: copies in memory, and attempts to train that follow each other."""
