"""Rows of a served model on read-only servers of other machines."""
