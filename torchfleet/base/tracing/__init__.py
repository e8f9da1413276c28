"""Spans of training steps, on workers and servers: recorded, exported to OpenTelemetry, kept for a profile."""
