"""Predictions over HTTP from a saved model: `fleet serve`."""
