"""How ids are computed from a batch: recorded once, replayed on the following batches."""
