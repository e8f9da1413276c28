"""Shows and records a running job: its display, its warnings, its record, and exports to other tools."""
