"""Processes of a job as children of actors of Ray."""
