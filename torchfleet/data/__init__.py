"""Datasets: from files to batches (docs/data.md). `__init__.pyi` lists the public names, imported when first used.

Three of them are functions of a job, which are defined above this wing, in api/datasets.py.
"""

from __future__ import annotations

from torchfleet.base import lazy_names

__getattr__, __dir__, __all__ = lazy_names.attach(__name__, __file__)
