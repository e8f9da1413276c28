"""A worker's cache of hot rows, on the device of its model, in front of the servers."""
