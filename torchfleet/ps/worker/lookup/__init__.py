"""How the lookups of a step become one pull per server, and their gradients one push."""
