"""Tables of rows in the memory of a GPU, with a twin of every kernel in plain torch that runs on any device."""
