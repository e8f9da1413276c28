"""Servers with a backup each: where the backups are, who decides between the two, and what the end of one means."""
