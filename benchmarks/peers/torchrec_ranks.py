"""TorchRec on CPU over gloo (docs/compare.md says how it is installed): one table cut by rows over the ranks, row-wise
Adagrad fused into backward, and the tower in DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import clicks
from benchmarks.peers.torch_clicks import Clicks, parts, stepping, test_auc, trainer

_FEATURES = [f"C{number}" for number in range(clicks.NUM_IDS)]


class Rows(torch.nn.Module):
    """A bag of one id for each of 26 features of one table."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        super().__init__()
        config = EmbeddingBagConfig(
            num_embeddings=clicks.num_rows(chosen),
            embedding_dim=chosen.dim,
            name="rows",
            feature_names=_FEATURES,
            weight_init_min=-clicks.INITIAL,
            weight_init_max=clicks.INITIAL,
        )
        self.collection: Any = EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        keyed = KeyedJaggedTensor(_FEATURES, ids.t().contiguous().view(-1), lengths=lengths)
        return self.collection(keyed).values()  # type: ignore[no-any-return]


def main() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel

    chosen = clicks.options()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(chosen.port), "RANK": str(chosen.index)}
    os.environ.update({**place, "LOCAL_RANK": str(chosen.index), "WORLD_SIZE": str(chosen.number)})
    dist.init_process_group("gloo")
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": clicks.ROW_WISE, "eps": 1e-8}
    sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=fused)]
    model = DistributedModelParallel(Clicks(Rows(chosen), chosen), device=torch.device("cpu"), sharders=sharders)
    tower = [weight for name, weight in model.named_parameters() if "tower" in name]
    step = stepping(torch.optim.Adam(tower, lr=clicks.ADAM))
    warm, own, num = parts(chosen)
    found = clicks.timed(trainer(model, step, iter), warm, own, num)
    score = test_auc(model, chosen)  # a lookup is an exchange: all ranks make it
    clicks.tell({**found, **({"auc": score} if chosen.index == 0 else {})})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
