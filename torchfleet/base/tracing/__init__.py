"""Spans of training steps on workers and servers: recorded, exported to OpenTelemetry, and saved for a profile."""
