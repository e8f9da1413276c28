"""Hugging Face Accelerate on CPUs (gloo): its `prepare` around the same model with dense gradients."""

from __future__ import annotations

import os

import torch

from benchmarks.peers import clicks
from benchmarks.peers.torch_clicks import Clicks, parts, plain_rows, test_auc


def main() -> None:
    from accelerate import Accelerator
    from torch.nn import functional as F

    chosen = clicks.options()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(chosen.seed)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(chosen.port), "RANK": str(chosen.index)}
    os.environ.update({**place, "LOCAL_RANK": str(chosen.index), "WORLD_SIZE": str(chosen.number)})
    accelerator = Accelerator(cpu=True)
    plain = Clicks(plain_rows(chosen), chosen)
    plain.rows.sparse = False  # type: ignore[assignment]
    model, optimizer = accelerator.prepare(plain, torch.optim.Adam(plain.parameters(), lr=clicks.ADAM))
    warm, own, num = parts(chosen)

    def train(data: torch.utils.data.DataLoader) -> None:  # type: ignore[type-arg]
        for ids, dense, label in data:
            accelerator.backward(F.binary_cross_entropy_with_logits(model(ids, dense), label))
            optimizer.step()
            optimizer.zero_grad()

    found = clicks.timed(train, warm, own, num)
    if chosen.index == 0:
        found["auc"] = test_auc(plain, chosen)
    accelerator.wait_for_everyone()
    clicks.tell(found)
    accelerator.end_training()


if __name__ == "__main__":
    main()
