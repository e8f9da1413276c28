"""Prometheus metrics of a process's status, on its own port."""
