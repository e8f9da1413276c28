"""Requests to the servers: key ownership, requests in flight, and retries."""
