"""Plain torch with DistributedDataParallel over gloo: every rank holds all rows; sparse gradients are gathered."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benchmarks.peers import clicks
from benchmarks.peers.torch_clicks import Clicks, parts, plain_rows, stepping, test_auc, trainer


def main() -> None:
    chosen = clicks.options()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(chosen.port)})
    dist.init_process_group("gloo", rank=chosen.index, world_size=chosen.number)
    plain = Clicks(plain_rows(chosen), chosen)
    model = torch.nn.parallel.DistributedDataParallel(plain)
    rows = torch.optim.SparseAdam(list(plain.rows.parameters()), lr=clicks.ADAM)
    step = stepping(rows, torch.optim.Adam(plain.tower.parameters(), lr=clicks.ADAM))
    warm, own, num = parts(chosen)
    found = clicks.timed(trainer(model, step, iter), warm, own, num)
    if chosen.index == 0:
        found["auc"] = test_auc(plain, chosen)
    dist.barrier()
    clicks.tell(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
