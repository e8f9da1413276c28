"""Shows and records a running job: all that a launcher, or `fleet`, tells people of it."""
