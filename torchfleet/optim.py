"""Optimizers for fleet.distributed_optimizer, or, without parameters, for one table: SparseEmbedding(optimizer=...).

torch does not have RowWiseAdagrad, FTRL and Lion; the others are torch's own classes, whose parameters may be left
out. `optim.pyi` lists the names. docs/rows.md says which to choose.
"""

from __future__ import annotations

from torchfleet.base import lazy_names

__getattr__, __dir__, __all__ = lazy_names.attach(__name__, __file__)
