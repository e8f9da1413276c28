"""Whole tables as torch sees them: what state_dict holds of an embedding and is loaded from, what copies share."""
