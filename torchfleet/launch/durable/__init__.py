"""Servers with a log: which flags they have, and where the logs are."""
