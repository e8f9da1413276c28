"""The server: a loop, a dictionary of commands, and the tables they work on. It does not import torch."""
