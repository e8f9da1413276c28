"""fleet.optim: optimizers for parameters, and without parameters for the rows of one table."""
