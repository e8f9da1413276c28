"""The exceptions of torchfleet; torchfleet.base.errors defines them."""

from torchfleet.base.errors import *  # noqa: F403
