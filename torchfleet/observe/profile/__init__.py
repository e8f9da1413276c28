"""`fleet profile`: requests a profile from a job, and merges the files of its processes into one trace."""
