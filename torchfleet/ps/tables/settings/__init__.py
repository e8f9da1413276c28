"""The settings of a table: its description, policies, clock, and key ownership."""
