"""A worker of a job with parameter servers: from a model and its optimizer to pulls and pushes."""
