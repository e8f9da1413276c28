"""`fleet.prepare`: a model, an optimizer and a loader of a script that exists, for a job with servers."""
