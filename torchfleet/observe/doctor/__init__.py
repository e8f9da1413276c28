"""`fleet doctor`: finds problems of this machine, its software and its links that affect a job."""
