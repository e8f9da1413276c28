"""Collective training: every worker holds the model, and they exchange gradients or parameters among themselves."""
