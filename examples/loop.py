"""What several examples share: an ordinary loop of torch over a worker's own batches, and the save at its end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from examples.columns import Batches, Columns
from examples.flags import own_batch_size


def train(
    loss_of: Callable[[Columns], torch.Tensor], optimizer: Any, columns: Columns, options: argparse.Namespace
) -> None:
    """`--epochs` passes over this worker's share, with a line of progress every 50 steps.

    When it returns, the updates of all workers are with the servers, and the network is here as they have left it.
    """
    losses: list[float] = []
    batch_size = own_batch_size(options, fleet.worker_num())
    for epoch in fleet.epochs(options.epochs):
        own = Batches(columns, batch_size, fleet.worker_index(), fleet.worker_num(), options.seed + epoch)
        for step, batch in enumerate(
            fleet.prefetch(own)
        ):  # asks for the rows of the next batch while this one computes
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 50 == 0:
                fleet.report(loss=np.mean(losses[-50:]))
                print(f"epoch {epoch + 1} step {step:4} loss {np.mean(losses[-50:]):.4f}", flush=True)
    fleet.flush()
    fleet.barrier_worker()
    fleet.flush()  # once more: what the others sent before the barrier


def save(options: argparse.Namespace) -> None:
    """By the first worker, if --save says where to."""
    if options.save:
        fleet.save_persistables(options.save)
        print(f"saved to {options.save}; predict with predict.py --model {options.save}")
