"""Search by coverage for inputs that a decoder does not take well: `python -m support.fuzz --help`."""
