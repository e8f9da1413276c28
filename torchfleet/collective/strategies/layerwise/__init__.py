"""LARS and LAMB: step sizes that follow the norms of layers."""
