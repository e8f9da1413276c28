"""Runs the processes of a job as children of Ray actors."""
