"""Versions of a served model: written by one process that follows a job, mapped by those that answer."""
