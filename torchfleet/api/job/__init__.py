"""Jobs: the protocol of both kinds, and jobs with parameter servers. Only this package knows workers and servers."""
