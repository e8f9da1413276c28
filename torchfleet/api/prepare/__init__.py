"""`fleet.prepare`: prepares the model, the optimizers and the loaders of an existing script for a job."""
