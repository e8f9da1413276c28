"""What is saved with a model so that it can be served without its code: its features, and its network as a graph."""
