"""A model whose every number is the same: what of it was saved, and whether that is whole, is one number."""

from __future__ import annotations

import numpy as np
import torch
from support import jobs
from support.scripts.saved_models import contents

from torchfleet import nn
from torchfleet.ps.server.saves.table_loading import load_model
from torchfleet.ps.server.server import Server

NUM_IDS = 20


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.SparseEmbedding(2, name="words", initializer=nn.Constant(0.0))
        self.linear = torch.nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.words(ids))


def set_all(part: jobs.Part, number: int) -> None:
    """Every number of the model is this one."""
    part.worker.client.assign("words", np.arange(NUM_IDS), np.full((NUM_IDS, 2), number, np.float32))
    part.worker.client.set_dense("dense.0", np.full(3, number, np.float32))
    part.model.mean.fill_(number)


def held(part: jobs.Part, folder: str) -> float:
    """The one number of the model in a folder."""
    server = Server(jobs.MAX_TABLE_BYTES)
    for spec in part.job.plan.specs:
        server.state.add_table(spec.for_shard(0, 1))
    load_model(server.state, folder, None)
    found = contents([server])
    assert [len(found[name]) for name in ("words", "dense.0", "dense.fixed")] == [NUM_IDS, 3, 3]
    (number,) = {value for rows in found.values() for row in rows.values() for value in np.frombuffer(row, np.float32)}
    return float(number)
