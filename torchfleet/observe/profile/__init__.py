"""`fleet profile`: asks a job for a profile, and makes one trace of what its processes leave."""
