"""Where workers meet: barriers, gathered bytes, parcels and shared lists of files."""
