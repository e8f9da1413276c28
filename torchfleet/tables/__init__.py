"""What a server keeps: rows by key and dense blocks, with their optimizers."""
