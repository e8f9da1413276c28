"""fleet.elastic: a killed rank is replaced while the others go on (docs/collective/elastic.md)."""

from __future__ import annotations

from torchfleet.api.elastic import run, steps
from torchfleet.base.lazy_names import nearest

__all__ = ["run", "steps"]
__getattr__ = nearest(__name__, __all__)
