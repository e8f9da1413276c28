"""Jobs on clusters: Ray, Kubernetes, Slurm."""
