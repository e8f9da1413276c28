"""Blocks of a model that heter workers compute: both sides of the call."""
