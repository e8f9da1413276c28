"""Datasets: from files to batches (docs/data.md). `__init__.pyi` lists the public names, imported when first used.

Three of them are functions of a job, defined in api/datasets.py, outside of this package.
"""

from __future__ import annotations

from torchfleet.base import lazy_names

__getattr__, __dir__, __all__ = lazy_names.attach(__name__, __file__)
