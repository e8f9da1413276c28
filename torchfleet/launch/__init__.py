"""fleetrun: starts the processes of a job, watches them, and leaves nothing behind."""
