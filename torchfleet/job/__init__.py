"""Jobs with parameter servers: the only place that knows workers and servers."""
