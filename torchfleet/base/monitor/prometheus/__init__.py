"""A process's status as metrics of Prometheus, on a port of its own."""
