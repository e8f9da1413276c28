"""The log of a server: entries in order, which are written to disk or sent to a backup, and can be replayed."""
