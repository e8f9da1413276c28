"""Between simulated processes: links, packets, and where ranks meet."""
