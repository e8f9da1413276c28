"""What a worker holds on to while it trains: its servers, and the model with its optimizers."""
