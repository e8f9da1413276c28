"""How ids are computed from a batch: recorded once, carried out again on the batches that follow."""
