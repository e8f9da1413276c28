"""pipeline: layers in stages on different ranks."""
