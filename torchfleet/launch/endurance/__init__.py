"""What makes servers outlast their processes: logs on disk, and backups."""
