"""Fault tolerance of servers: logs on disk, and backups."""
