"""Layers: embeddings whose rows live on the servers, first values of their rows, and layers of collective training.

ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelDropout, ParallelRandom, parallel_random:
docs/collective/tensor_parallel.md. MarginSoftmax: docs/collective/classification.md. `nn.pyi` lists the names; those of
collective training import 550 modules of torch, which jobs with servers do without.
"""

from __future__ import annotations

from torchfleet.base import lazy_names

__getattr__, __dir__, __all__ = lazy_names.attach(__name__, __file__)
