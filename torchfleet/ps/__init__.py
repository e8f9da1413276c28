"""Parameter servers: workers, servers, tables, kernels, the wire between them, and saved models."""
