"""What stands in a model where a table's values would stand in plain torch, and who else holds it."""
