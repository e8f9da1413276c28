"""Servers with a backup. The backup has every change of the primary before the client gets the reply."""
