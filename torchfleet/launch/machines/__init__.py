"""How the machines of a collective job find each other."""
