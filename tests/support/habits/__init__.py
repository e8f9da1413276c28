"""Habits of torch in every mode: a registry of small cases, what runs each beside plain torch, and the page of them."""
