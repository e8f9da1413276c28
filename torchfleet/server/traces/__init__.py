"""Requests of steps that are traced, as a server sees them."""
