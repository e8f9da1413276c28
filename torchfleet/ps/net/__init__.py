"""Messages, and how they travel between workers and servers."""
