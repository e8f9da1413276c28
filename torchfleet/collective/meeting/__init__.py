"""How ranks with different amounts of data come together: agreement on batches, and who waits for whom."""
