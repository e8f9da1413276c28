"""Where the machines of a collective job meet."""
