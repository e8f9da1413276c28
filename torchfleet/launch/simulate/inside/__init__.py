"""What runs inside a simulated process, in the place of real threads, clocks, sockets and ranks."""
