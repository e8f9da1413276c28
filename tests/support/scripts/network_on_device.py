"""Script 7 of the design, as it stands: rows on servers, the network among the workers, on a GPU where there is one.
Batches are made up; at the end each worker tells where its network is, and the loss before and after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

import torchfleet as fleet

STEPS, BATCH = 40, 64


class CTRDNN(torch.nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.embedding = fleet.nn.SparseEmbedding(dim, name="deep")
        self.tower = torch.nn.Sequential(torch.nn.Linear(26 * dim + 13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return self.tower(torch.cat([self.embedding(ids).flatten(1), dense], dim=1)).squeeze(1)


def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A label follows from the first id. The loop of script 1 moves nothing, so the batches come on the device."""
    made = torch.Generator().manual_seed(fleet.worker_index())
    for _ in range(STEPS):
        ids = torch.randint(100, (BATCH, 26), generator=made)
        dense = torch.rand(BATCH, 13, generator=made)
        yield ids, dense.to(fleet.device()), (ids[:, 0] % 2).float().to(fleet.device())


torch.manual_seed(0)
strategy = fleet.DistributedStrategy(a_sync=True, a_sync_configs={"hybrid": True}, amp=True)
fleet.init(strategy=strategy)
model = fleet.distributed_model(CTRDNN().to(fleet.device()))
optimizer = fleet.distributed_optimizer(
    torch.optim.AdamW(
        [
            {"params": model.embedding.parameters(), "lr": 1e-2},
            {"params": model.tower.parameters(), "lr": 1e-2},
        ]
    )
)
if fleet.is_server():
    assert fleet.device() == torch.device("cpu")
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    losses = []
    for ids, dense, label in fleet.prefetch(loader()):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, dense), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if fleet.is_first_worker():
        fleet.save_persistables("model")
    places = sorted({str(parameter.device) for parameter in model.tower.parameters()} | {str(fleet.device())})
    report = {"worker": fleet.worker_index(), "devices": places, "losses": [sum(losses[:5]) / 5, sum(losses[-5:]) / 5]}
    fleet.stop_worker()
    print(f"found {json.dumps(report)}", flush=True)
