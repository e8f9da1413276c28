"""Messages between workers and servers, and the transports that carry them."""
