"""`fleet doctor`: what of this machine, its software and its links will hurt a job."""
