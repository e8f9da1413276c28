"""Planted bugs, by what they are bugs of; planted.py in the folder above says what a planted bug is."""
