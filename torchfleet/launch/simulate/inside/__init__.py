"""What replaces real threads, clocks, sockets and ranks inside a simulated process."""
