"""How workers meet: barriers, gathers, rounds, parcels and shared lists of files."""
