"""Jobs on engines that schedule processes themselves: Ray, Kubernetes, Slurm."""
