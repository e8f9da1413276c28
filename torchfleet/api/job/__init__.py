"""Jobs: the protocol of both kinds, and jobs with parameter servers, the only place that knows workers and servers."""
