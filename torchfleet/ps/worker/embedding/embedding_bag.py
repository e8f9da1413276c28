"""SparseEmbeddingBag: a SparseEmbedding with the arguments of torch.nn.EmbeddingBag."""

from __future__ import annotations

import torch

from torchfleet.ps.worker.embedding.compilation import keep_from_compilers
from torchfleet.ps.worker.embedding.embedding import Lookups, SparseEmbedding
from torchfleet.ps.worker.embedding.embedding_arguments import Ids, bag_arguments, hashed_ids
from torchfleet.ps.worker.lookup.device_forward import Prepared
from torchfleet.ps.worker.lookup.device_lookups import DeviceLookups


class SparseEmbeddingBag(SparseEmbedding):
    """The replacement of torch.nn.EmbeddingBag(sparse=True): two-dimensional ids are bags of equal length."""

    include_last_offset = False  # as in the torch embedding that it replaces

    def bind(self, engine: Lookups | DeviceLookups) -> None:
        """As SparseEmbedding.bind."""
        super().bind(engine)
        if self.table_device is None:
            keep_from_compilers(SparseEmbeddingBag)

    def forward(
        self, ids: Ids, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.table_device is None:
            ids, offsets = self._as_bags(ids, offsets)
            if offsets is None and isinstance(ids, torch.Tensor):
                offsets = torch.arange(0, ids.numel(), max(1, ids.size(1)))[: ids.size(0)]
        return super().forward(ids, offsets, per_sample_weights)

    def prepared(
        self, ids: Ids, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> Prepared:
        ids, offsets = self._as_bags(ids, offsets)
        if offsets is not None or not isinstance(ids, torch.Tensor):
            return super().prepared(ids, offsets, per_sample_weights)
        found = super().prepared([ids], None, per_sample_weights)
        return Prepared(found.ids, lambda values: found.finish(values).squeeze(1))

    def _as_bags(self, ids: Ids, offsets: torch.Tensor | None) -> tuple[Ids, torch.Tensor | None]:
        ids = ids if isinstance(ids, torch.Tensor) else hashed_ids(self.name, self.num_embeddings, ids)
        return bag_arguments(self.path, ids, offsets, self.include_last_offset)
