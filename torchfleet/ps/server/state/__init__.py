"""All that a server owns."""
