"""Whole tables as torch sees them: an embedding's state_dict and load_state_dict, and what copies share."""
