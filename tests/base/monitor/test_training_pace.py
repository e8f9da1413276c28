"""The mean speed that a process reports."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from support.cases import each_of

import torchfleet as fleet

pytestmark = pytest.mark.slow
_BATCH = 32


@each_of("a_sync", [False, True])
def test_the_mean_speed_ends_with_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a_sync: bool) -> None:
    """Whatever the worker does after its loop, as evaluation and a save: the last report comes after them."""
    file = tmp_path / f"status {a_sync}"
    monkeypatch.setenv("FLEET_STATUS_FILE", str(file))
    strategy = fleet.DistributedStrategy(a_sync=a_sync)
    model = torch.nn.Sequential(fleet.nn.SparseEmbedding(2), torch.nn.Linear(2, 1))
    try:
        model, optimizer = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
        time.sleep(0.6)  # so that a report is due at the first step
        begins, ends = [], []
        for _ in range(4):
            model(torch.arange(_BATCH)).sum().backward()
            begins.append(time.monotonic())
            optimizer.step()
            ends.append(time.monotonic())
            optimizer.zero_grad()
            time.sleep(0.02)
        time.sleep(1.0)
        fleet.stop_worker()
    finally:
        fleet.reset()
    found = json.loads(file.read_text())
    assert (found["steps"], found["samples"]) == (4, 4 * _BATCH)
    least, most = 3 * _BATCH / (ends[-1] - begins[0]), 3 * _BATCH / (begins[-1] - ends[0])
    assert least <= found["samples_per_s_mean"] <= most
