"""How a server writes its tables to files, and loads them."""
