"""DistributedStrategy: every setting of a job, from code, files or a command line."""
