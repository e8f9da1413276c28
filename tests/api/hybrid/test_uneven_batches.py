"""Balance: workers of different speeds train the model of one process that has their batches as one."""

from __future__ import annotations

import msgspec
import pytest
import torch
from support import jobs
from support.jobs import Batch, Part

from torchfleet.api.hybrid.server_average import ServerAverage
from torchfleet.api.hybrid.server_rounds import Told

SPEEDS = (5.0, 1.0, 4.0)  # samples per second, as the workers tell them
USUAL, NUM_WORKERS = 8, len(SPEEDS)
SIZES = [(USUAL,) * NUM_WORKERS] * 3 + [(12, 2, 10)] * 3  # by step: two batches are cut ahead, before a speed is known
IDS_OF_STEP = 90 // len(SIZES)
RATE = 0.3  # of rows


def rows_of(worker: int) -> Batch:
    """All samples of a worker. Steps share no ids, so that it does not matter when rows are pulled and pushed."""
    steps = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor([sizes[worker] for sizes in SIZES]))
    made = torch.Generator().manual_seed(worker)
    ids = torch.randint(0, IDS_OF_STEP, (len(steps), 3), generator=made) + IDS_OF_STEP * steps[:, None]
    numbers = torch.randn(len(steps), 2, generator=made)
    return {"ids": ids, "x": numbers, "y": (numbers[:, 0] + torch.randn(len(steps), generator=made) > 0).float()}


def cut(rows: Batch, sizes: list[int]) -> list[Batch]:
    parts = {name: value.split(sizes) for name, value in rows.items()}
    return [{name: value[i] for name, value in parts.items()} for i in range(len(sizes))]


def of_usual_size(worker: int) -> list[Batch]:
    rows = rows_of(worker)
    num = len(rows["y"])
    return cut(rows, [USUAL] * (num // USUAL) + ([num % USUAL] if num % USUAL else []))


def make(model: torch.nn.Module) -> torch.optim.Optimizer:
    dense, sparse = jobs.split_parameters(model)
    return torch.optim.Adam([{"params": dense, "lr": 0.05}, {"params": sparse, "lr": RATE, "row_rule": "sgd"}])


def in_one_process() -> dict[str, torch.Tensor]:
    """Every worker's batch is an update of rows, of the sum over its samples divided by the usual batch. All of a step
    together: that of the mean, times the number of workers."""
    torch.manual_seed(0)
    model = jobs.Clicks()
    dense, sparse = jobs.split_parameters(model)
    optimizers = [torch.optim.Adam(dense, lr=0.05), torch.optim.SGD(sparse, lr=NUM_WORKERS * RATE)]
    own = [cut(rows_of(worker), [sizes[worker] for sizes in SIZES]) for worker in range(NUM_WORKERS)]
    for step in range(len(SIZES)):
        together = {name: torch.cat([batches[step][name] for batches in own]) for name in own[0][0]}
        jobs.click_step(model, optimizers, together)
    return jobs.values_of(model)


def test_uneven_batches_train_rows_and_network_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ServerAverage._told

    def told(average: ServerAverage) -> Told:
        own = measured(average)
        assert own.samples
        return msgspec.structs.replace(own, seconds=own.samples / SPEEDS[average.rounds.worker])

    monkeypatch.setattr(ServerAverage, "_told", told)

    def body(part: Part) -> list[int]:
        sizes = []
        for batch in part.prefetch(of_usual_size(part.index)):
            jobs.click_step(part.model, [part.optimizer], batch)
            sizes.append(len(batch["y"]))
        return sizes

    done = jobs.run(
        body, jobs.Clicks, make, mode="hybrid", exchange="servers", balance=True, num_workers=NUM_WORKERS, num_servers=2
    )
    assert list(zip(*done.results, strict=True)) == SIZES
    wanted, dense = in_one_process(), {}
    for part in done.parts:
        dense = {name: value.detach() for name, value in part.model.named_parameters() if len(value)}
        jobs.assert_equal_values(dense, {name: wanted[name] for name in dense}, 1e-5)
    assert dense
    jobs.assert_equal_values(done.values(wide=90), wanted, 1e-5)
