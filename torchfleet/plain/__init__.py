"""The way out: a distributed model as an ordinary torch module."""

from torchfleet.plain.to_plain import to_plain

__all__ = ["to_plain"]
