"""Jobs on clusters of others: Ray, Kubernetes, Slurm."""
