"""The `fleetrun` command line: starts the processes of a job, watches them, and ends them together."""
