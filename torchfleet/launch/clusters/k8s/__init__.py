"""Jobs on Kubernetes: manifests of built-in kinds, and what is asked of a cluster about them."""
