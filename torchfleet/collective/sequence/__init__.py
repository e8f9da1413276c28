"""Long sequences: each rank has a part of every sequence."""
