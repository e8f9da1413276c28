"""FBGEMM's table-batched embedding on CPU (pip install fbgemm-gpu-cpu), row-wise Adagrad inside backward."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.peers import clicks
from benchmarks.peers.torch_clicks import Clicks, parts, stepping, test_auc, trainer


class Rows(torch.nn.Module):
    """Bags of one id each."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        super().__init__()
        self._table: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(clicks.num_rows(chosen), chosen.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=clicks.ROW_WISE,
            eps=1e-8,
        )
        torch.nn.init.uniform_(self._table.split_embedding_weights()[0], -clicks.INITIAL, clicks.INITIAL)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self._table(ids.reshape(-1), torch.arange(ids.numel() + 1))
        return found.view(len(ids), -1)  # type: ignore[no-any-return]


def main() -> None:
    chosen = clicks.options()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    model = Clicks(Rows(chosen), chosen)
    step = stepping(torch.optim.Adam(model.tower.parameters(), lr=clicks.ADAM))  # rows are updated in backward
    warm, own, num = parts(chosen)
    found = clicks.timed(trainer(model, step, iter), warm, own, num)
    clicks.tell({**found, "auc": test_auc(model, chosen)})


if __name__ == "__main__":
    main()
