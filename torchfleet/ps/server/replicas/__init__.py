"""Servers with a backup: the backup has every change of the primary before a client gets the reply."""
