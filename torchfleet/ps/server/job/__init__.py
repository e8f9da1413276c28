"""A server as a process of a job: its command line, its start, its loop and its end."""
