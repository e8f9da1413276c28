"""Servers with a backup: what one of them changes, the other has before anybody is told."""
