"""The state of a server."""
