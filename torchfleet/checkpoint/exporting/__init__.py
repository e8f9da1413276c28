"""Saved models as files of other formats."""
