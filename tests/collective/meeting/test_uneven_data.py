"""Ranks with different amounts of data: they end together with prefetch, and learn of it within seconds without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from support.messages import lines_naming, names
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import WorkerMissing


def start() -> tuple[Any, Any]:
    fleet.init(is_collective=True)
    model = fleet.distributed_model(torch.nn.Linear(4, 2))
    return model, fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def uneven(lengths: list[int]) -> dict[str, Any]:
    """Without prefetch. The longer rank is left alone in its step, until the other one's process has ended."""
    model, optimizer = start()
    rank = fleet.worker_index()
    began, text = time.monotonic(), ""
    try:
        for _ in range(lengths[rank]):
            step(model, optimizer)
        fleet.stop_worker()
    except WorkerMissing as error:
        text = str(error)
    except RuntimeError as error:
        text = f"torch: {error}"
    return {"text": text, "seconds": time.monotonic() - began}


def test_uneven_data_without_prefetch_is_named_within_seconds(ranks: Ranks) -> None:
    first, second = ranks.run(uneven, 2, lengths=[2, 4])
    assert names(first["text"], "rank 1", "step 3", "rank 0", "fleet.stop_worker()", 2)
    assert "fleet.prefetch" in first["text"]
    assert second["text"].startswith("torch:")
    assert max(first["seconds"], second["seconds"]) < 40  # of a sync_timeout of 1800


def slow_meetings() -> dict[str, Any]:
    """A rank that is long in coming is no error: after a backward pass without a step, and in an evaluation."""
    model, optimizer = start()
    step(model, optimizer)
    model(torch.ones(3, 4)).square().mean().backward()  # all ranks make it, and none steps
    if fleet.worker_index() == 1:
        time.sleep(5)
        with torch.no_grad():
            model(torch.ones(3, 4))
    fleet.barrier_worker()
    total = fleet.util.all_reduce(fleet.worker_index() + 1)
    fleet.stop_worker()
    return {"total": total}


def test_a_rank_that_is_only_slow_is_waited_for(ranks: Ranks) -> None:
    assert [found["total"] for found in ranks.run(slow_meetings, 2)] == [3, 3]


def ahead(folder: str) -> dict[str, Any]:
    """Rank 1 keeps its first batch until rank 0 has had its second."""
    start()
    flag, had = Path(folder) / "second", []
    for batch in fleet.prefetch(range(3)):
        had.append(batch)
        if fleet.worker_index() == 0 and batch == 1:
            flag.touch()
        deadline = time.monotonic() + 40
        while fleet.worker_index() == 1 and not flag.exists():
            assert time.monotonic() < deadline, "rank 0 waits for rank 1 before every batch"
            time.sleep(0.01)
    return {"had": had}


def test_prefetch_does_not_wait_for_the_others_at_every_batch(ranks: Ranks, tmp_path: Path) -> None:
    assert [found["had"] for found in ranks.run(ahead, 2, folder=str(tmp_path))] == [[0, 1, 2]] * 2


def save_early(folder: str) -> dict[str, Any]:
    model, optimizer = start()
    try:
        for _ in range(1 + fleet.worker_index()):
            step(model, optimizer)
        fleet.save(folder)
    except (WorkerMissing, RuntimeError) as error:
        return {"text": str(error)}
    return {"text": ""}


def test_a_save_is_a_meeting_too(ranks: Ranks, tmp_path: Path) -> None:
    """In the second step, in whose forward pass DistributedDataParallel exchanges its new buckets."""
    found = ranks.run(save_early, 2, folder=str(tmp_path))
    assert lines_naming(found[0]["text"], "rank 1", "step 2", "rank 0", "fleet.save", 1)
