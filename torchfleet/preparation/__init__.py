"""fleet.prepare: the objects of an ordinary script of torch's, made those of a job."""
