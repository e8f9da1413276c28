"""Everything torchfleet raises on purpose; torchfleet.base.errors defines the classes."""

from torchfleet.base.errors import *  # noqa: F403
