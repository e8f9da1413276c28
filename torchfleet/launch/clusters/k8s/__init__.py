"""Jobs on Kubernetes: manifests made of built-in kinds."""
