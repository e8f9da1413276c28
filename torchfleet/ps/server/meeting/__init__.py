"""How workers meet: barriers, gathers, parcels and shared lists of files."""
