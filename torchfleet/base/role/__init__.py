"""The role of this process in its job: worker or server, its index, and the addresses of all others."""
