"""Layers: embeddings whose rows live on the servers, initializers of their rows, and layers for collective training.

ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ParallelDropout, ParallelRandom, parallel_random:
docs/collective/tensor_parallel.md. MarginSoftmax: docs/collective/classification.md. `nn.pyi` lists the names. The
layers for collective training import 550 modules of torch, which jobs with servers do not need.
"""

from __future__ import annotations

from torchfleet.base import lazy_names

__getattr__, __dir__, __all__ = lazy_names.attach(__name__, __file__)
