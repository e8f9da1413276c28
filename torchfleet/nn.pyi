"""The names of fleet.nn, once: nn.py reads this file, and so do type checkers and editors."""

from torchfleet.collective.layers.margin_softmax import MarginSoftmax as MarginSoftmax
from torchfleet.collective.layers.parallel_random import (
    ParallelDropout as ParallelDropout,
    ParallelRandom as ParallelRandom,
    parallel_random as parallel_random,
)
from torchfleet.collective.layers.tensor_parallel import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
    VocabParallelEmbedding as VocabParallelEmbedding,
)
from torchfleet.ps.worker.embedding.conversion import convert as convert, sparse_embeddings as sparse_embeddings
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding as SparseEmbedding
from torchfleet.ps.worker.embedding.embedding_bag import SparseEmbeddingBag as SparseEmbeddingBag
from torchfleet.ps.worker.embedding.embedding_collection import SparseEmbeddingCollection as SparseEmbeddingCollection
from torchfleet.ps.worker.embedding.initializers import (
    Constant as Constant,
    Normal as Normal,
    TruncatedNormal as TruncatedNormal,
    Uniform as Uniform,
)
from torchfleet.ps.worker.embedding.two_part_embedding import TwoPartEmbedding as TwoPartEmbedding
