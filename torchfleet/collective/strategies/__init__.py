"""Strategies of collective training, one file each; those of several files have a folder."""
