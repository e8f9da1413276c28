"""Layers: embeddings whose rows live on the servers, first values of their rows, and layers of collective training.

ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelDropout, ParallelRandom, parallel_random:
docs/collective/tensor_parallel.md. MarginSoftmax: docs/collective/classification.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchfleet.ps.worker.lookup.conversion import convert, sparse_embeddings
from torchfleet.ps.worker.lookup.embedding import SparseEmbedding, SparseEmbeddingBag
from torchfleet.ps.worker.lookup.initializers import Constant, Normal, TruncatedNormal, Uniform

if TYPE_CHECKING:
    from torchfleet.collective.layers.margin_softmax import MarginSoftmax
    from torchfleet.collective.layers.parallel_random import ParallelDropout, ParallelRandom, parallel_random
    from torchfleet.collective.layers.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )

__all__ = [
    "ColumnParallelLinear",
    "Constant",
    "MarginSoftmax",
    "Normal",
    "ParallelDropout",
    "ParallelRandom",
    "RowParallelLinear",
    "SparseEmbedding",
    "SparseEmbeddingBag",
    "TruncatedNormal",
    "Uniform",
    "VocabParallelEmbedding",
    "convert",
    "parallel_random",
    "sparse_embeddings",
]

_COLLECTIVE = {
    "ColumnParallelLinear": "layers.tensor_parallel",
    "RowParallelLinear": "layers.tensor_parallel",
    "VocabParallelEmbedding": "layers.tensor_parallel",
    "ParallelDropout": "layers.parallel_random",
    "ParallelRandom": "layers.parallel_random",
    "parallel_random": "layers.parallel_random",
    "MarginSoftmax": "layers.margin_softmax",
}


def __getattr__(name: str) -> Any:
    """Layers of collective training are imported when they are used: jobs with servers start faster without."""
    if name not in _COLLECTIVE:
        raise AttributeError(f"torchfleet.nn has no '{name}'")
    return getattr(import_module(f"torchfleet.collective.{_COLLECTIVE[name]}"), name)
