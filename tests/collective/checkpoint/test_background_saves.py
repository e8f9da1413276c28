"""Saves beside training hold what the model was, to the byte, and failures surface; buffers are those of one rank."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.collective_oracles import job_of
from support.ranks import Ranks

from torchfleet.base.errors import CheckpointError
from torchfleet.collective.checkpoint import save_writing
from torchfleet.collective.checkpoint.loading import load_parameters
from torchfleet.collective.checkpoint.snapshots import Snapshots


class Training:
    """Batch norm of what each rank reads, then a layer; Adam. With and without `fields`."""

    def __init__(self, **fields: Any) -> None:
        self.job = job_of(**fields)
        self.rank = self.job.world.rank
        torch.manual_seed(0)
        self.model = self.job.distribute_model(network())
        kind = torch.optim.SGD if "localsgd" in fields else torch.optim.Adam
        self.optimizer = self.job.distribute_optimizer(kind(self.model.parameters(), lr=0.1))

    def steps(self, first: int, last: int) -> None:
        for x in inputs(self.rank)[first:last]:
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 64), torch.nn.BatchNorm1d(64))


def inputs(rank: int) -> torch.Tensor:
    return (1 + rank) * torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(rank)) + rank


def written_while_training_goes_on(folder: str) -> dict[str, Any]:
    training = Training()
    training.steps(0, 2)
    training.job.save(f"{folder}/at once", {"step": 2})
    gone_on, really_write = threading.Event(), save_writing.write_made_file

    def late(*args: Any) -> None:
        assert gone_on.wait(30)
        really_write(*args)

    save_writing.write_made_file = late
    number = training.job.save(f"{folder}/beside", {"step": 2}, asynchronous=True)
    is_there = Path(f"{folder}/beside/manifest.json").exists()
    training.steps(2, 4)
    gone_on.set()
    training.job.stop()  # waits for it
    return {"number": number, "is_there": is_there}


def test_a_save_beside_training_has_the_bytes_of_one_that_stops_it(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(written_while_training_goes_on, 2, folder=str(tmp_path)):
        assert found == {"number": 1, "is_there": False}
    files = sorted((tmp_path / "at once" / "save-000001").iterdir())
    assert len(files) == 2
    for file in files:
        assert file.read_bytes() == (tmp_path / "beside" / "save-000001" / file.name).read_bytes()
    for_time = {"time": 0.0}
    at_once, beside = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("at once", "beside"))
    assert {**at_once["manifest"], **for_time} == {**beside["manifest"], **for_time}


def failing(folder: str) -> dict[str, Any]:
    training = Training()
    training.steps(0, 1)
    training.job.save(folder, {"good": 1})
    really_write, texts, has_failed = save_writing.write_made_file, [], threading.Event()
    if training.rank == 1:

        def full(*_: Any) -> None:
            has_failed.set()
            raise OSError("no space left on device")

        save_writing.write_made_file = full
    training.job.save(folder, {"good": 2}, asynchronous=True)
    training.steps(1, 2)
    assert training.rank != 1 or has_failed.wait(60)  # the thread that writes may begin later than the step ends
    save_writing.write_made_file = really_write
    with pytest.raises(CheckpointError) as error:
        training.job.save(folder, {"good": 3}, asynchronous=True)
    texts.append(str(error.value))
    kept = training.job.load(folder)
    training.job.save(folder, {"good": 4}, asynchronous=True)
    return {"texts": texts, "kept": kept["good"], "then": training.job.load(folder)["good"]}


def test_a_full_disk_surfaces_at_the_next_call_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(failing, 2, folder=str(tmp_path)):
        assert found["texts"] == ["rank 1: OSError: no space left on device"]
        assert (found["kept"], found["then"]) == (1, 4)  # the old model stays; a load waits for the save before it


def test_a_snapshot_fits_any_types_and_layouts() -> None:
    sources = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "transposed": torch.randn(5, 7).t(),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4, dtype=torch.bfloat16),
        "half": torch.randn(3, dtype=torch.bfloat16),
    }
    snapshots = Snapshots()
    for _ in range(2):  # the second one takes the same memory
        expected = {name: source.clone() for name, source in sources.items()}
        copies = snapshots.take(sources)
        for source in sources.values():
            source.zero_()
        assert all(torch.equal(copies[name], value) for name, value in expected.items())
        sources["transposed"].fill_(3.0)


def saved_buffers(folder: str, **fields: Any) -> dict[str, Any]:
    training = Training(**fields)
    training.steps(0, 3)
    training.job.save(folder, None)
    return {}


def statistics(rank: int) -> torch.nn.BatchNorm1d:
    """Of what that rank has read, by torch alone."""
    norm = torch.nn.BatchNorm1d(5)
    for x in inputs(rank)[:3]:
        norm(x)
    return norm


@pytest.mark.parametrize("fields", [{}, {"localsgd": True, "localsgd_configs": {"k_steps": 2}}])
def test_saved_buffers_are_of_one_rank_or_the_mean(ranks: Ranks, tmp_path: Path, fields: dict[str, Any]) -> None:
    ranks.run(saved_buffers, 2, folder=str(tmp_path), **fields)
    found = network()
    load_parameters(str(tmp_path), found)
    both = [statistics(0), statistics(1) if fields else statistics(0)]
    for name in ("running_mean", "running_var"):
        expected = (getattr(both[0], name) + getattr(both[1], name)) / 2
        torch.testing.assert_close(getattr(found[0], name), expected)
    assert found[0].num_batches_tracked == 3
