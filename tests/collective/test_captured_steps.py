"""What a step does while a CUDA graph captures it: nothing that a capture forbids. The captures are played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_tables import spec

import torchfleet as fleet
from torchfleet.base.errors import TableError
from torchfleet.collective import collective_job
from torchfleet.collective.meeting import gpu_progress
from torchfleet.collective.meeting.gpu_progress import GpuProgress
from torchfleet.ps.gpu import device_table
from torchfleet.ps.gpu.change_tracking import ChangeTracking
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.graph_capture import check_capture
from torchfleet.ps.tables.settings.policy import CountFilterEntry, Shrink
from torchfleet.ps.worker.lookup.device_lookups import RowsOnDevice, keep_gradients

CPU = torch.device("cpu")


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A job of one rank, and the file to which it reports."""
    monkeypatch.setenv("FLEET_STATUS_FILE", str(tmp_path / "status"))
    monkeypatch.setenv("FLEET_DEVICE", "cpu")
    fleet.init(is_collective=True)
    yield tmp_path / "status"
    fleet.stop_worker()


def begin(model: torch.nn.Module) -> tuple[Any, Any]:
    made = fleet.distributed_model(model)
    return made, fleet.distributed_optimizer(torch.optim.SGD(made.parameters(), lr=0.1))


def step(model: Any, optimizer: Any, num: int = 8) -> None:
    model(torch.ones(num, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_a_distributed_model_is_compiled_once(status: Path) -> None:
    """Not in every step: a compilation within a capture would end it."""
    model, optimizer = begin(torch.nn.Linear(2, 1))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    for number in range(5):
        step(compiled, optimizer)
        assert model.num_samples == 8 * (number + 1)
    assert len(graphs) == 1


def test_a_status_reads_no_loss_in_a_capture(status: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = begin(torch.nn.Linear(2, 1))
    read: list[list[str]] = []

    def numbers(values: dict[str, Any]) -> dict[str, float]:
        read.append(sorted(values))
        return {}

    monkeypatch.setattr(collective_job, "numbers", numbers)
    monkeypatch.setattr(collective_job, "is_capturing", lambda device: True)
    step(model, optimizer)
    assert not read
    monkeypatch.setattr(collective_job, "is_capturing", lambda device: False)
    step(model, optimizer)
    assert read == [["loss"]]


def test_progress_of_a_gpu_is_read_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = GpuProgress(CPU)
    assert not progress.is_computing
    progress.note()
    assert not progress.is_computing  # a CPU has done it
    progress._finished.zero_()  # as long as a GPU works
    assert progress.is_computing
    progress.note()
    monkeypatch.setattr(gpu_progress, "is_capturing", lambda device: True)
    progress.note()
    assert not progress.is_computing


@pytest.mark.parametrize(
    "fields",
    [
        {"entry": CountFilterEntry(2)},
        {"shrink": Shrink(max_rows=100)},
        {"shrink": Shrink(delete_after_unseen_days=3)},
        {"shrink": Shrink(ttl_days=3)},
    ],
)
def test_tables_that_need_the_host_are_not_captured(fields: dict[str, Any]) -> None:
    with pytest.raises(TableError, match="'ads'"):
        check_capture(DeviceTable(spec(**fields), "cpu", 128))
    with pytest.raises(TableError, match=r"'ads'.*capacity"):
        check_capture(DeviceTable(spec(), "cpu"))
    check_capture(DeviceTable(spec(), "cpu", 128))


def test_changes_are_not_tracked_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    table = DeviceTable(spec(dim=2), "cpu", 128)
    slots = table.find(torch.arange(5), insert=True)
    table.tracking = ChangeTracking(table)
    table.push(slots[:2], torch.ones(2, 2))
    monkeypatch.setattr(device_table, "is_capturing", lambda device: True)
    table.push(slots, torch.ones(5, 2))
    table.tracking.begin(is_committed=True)
    assert table.tracking.changed(0, 128).tolist() == slots[:2].tolist()


def test_compiled_code_may_reuse_what_it_gave_to_the_step() -> None:
    rows = RowsOnDevice(DeviceTable(spec(dim=2), "cpu", 128))
    given = torch.ones(3, 2), torch.arange(3, dtype=torch.int32)
    keep_gradients(*given, rows.number)
    for tensor in given:
        tensor.zero_()
    ((slots, grads),) = rows.pending
    assert slots.tolist() == [0, 1, 2]
    assert grads.tolist() == [[1.0, 1.0]] * 3
