"""fleet.save and fleet.load of collective training."""
