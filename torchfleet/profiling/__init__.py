"""Steps that are traced or profiled, on workers, ranks and servers."""
