"""Tables on the devices of several ranks against one rank, and their saves against tables on servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.jobs import Servers
from support.messages import names
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint import collective_manifest
from torchfleet.observe.commands.inspect_saved import inspect_model
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.gpu.sharded_table import owners
from torchfleet.ps.server.saves.table_loading import load_model
from torchfleet.ps.tables.settings.owners import owners_of
from torchfleet.ps.tables.settings.spec import TableSpec

pytestmark = pytest.mark.slow

STEPS, BATCH = 6, 16


class Model(torch.nn.Module):
    """Two lookups in one table, one of them pooled, and a table with a size and padding."""

    def __init__(self, device: str | None = "cpu", state: Any = "none") -> None:
        super().__init__()
        settings: dict[str, Any] = {"device": device, "state": state}
        first = fleet.nn.Uniform(-0.1, 0.1)
        self.items = fleet.nn.SparseEmbedding(4, name="items", initializer=first, **settings)
        self.bags = fleet.nn.SparseEmbedding(4, name="items", initializer=first, **settings)
        settings["state"] = None if state == "rows" else state  # a table with a size shows all of its rows
        self.tags = fleet.nn.SparseEmbedding(3, name="tags", num_embeddings=50, padding_idx=7, **settings)
        self.top = torch.nn.Linear(11, 1)

    def forward(self, ids: torch.Tensor, bags: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(0, bags.numel(), bags.size(1))
        rows = [self.items(ids).sum(1), self.bags(bags.reshape(-1), offsets), self.tags(tags).sum(1)]
        return self.top(torch.cat(rows, 1)).squeeze(1)


def batches(num: int, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    draws = torch.Generator().manual_seed(seed)

    def ids(limit: int, *shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=draws) ** 2 * limit).long()

    return [
        (ids(90, BATCH, 3) - 20, ids(90, BATCH, 2), ids(50, BATCH, 2), torch.rand(BATCH, generator=draws))
        for _ in range(num)
    ]


def begin(optimizer: str = "adam", device: str | None = "cpu", state: Any = "none") -> tuple[Any, Any]:
    torch.manual_seed(0)
    fleet.init(is_collective=True)
    model = fleet.distributed_model(Model(device, state))
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    return model, fleet.distributed_optimizer(kinds[optimizer](model.parameters(), lr=0.05))


def train(model: Any, optimizer: Any, data: list[tuple[torch.Tensor, ...]]) -> None:
    rank, size = fleet.worker_index(), fleet.worker_num()
    for batch in data:
        *inputs, target = (tensor[rank::size] for tensor in batch)
        (model(*inputs) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def predicted(model: Any) -> torch.Tensor:
    *inputs, _ = batches(1, seed=9)[0]
    with torch.no_grad():
        found: torch.Tensor = model(*inputs)
    return found


def trained(optimizer: str, folder: str, loads: str = "") -> dict[str, Any]:
    """Train, or go on from a save; then save in both ways."""
    model, made = begin(optimizer)
    if loads:
        fleet.load(f"{folder}/{loads}")
    train(model, made, batches(STEPS, seed=int(bool(loads))))
    size = fleet.worker_num()
    fleet.save(f"{folder}/collective-{size}{loads}")
    fleet.save_persistables(f"{folder}/tables-{size}{loads}")
    train(model, made, batches(2, seed=3))
    fleet.save_persistables(f"{folder}/tables-{size}{loads}", mode=1)
    found = {"predicted": predicted(model), "top": model.module.top.weight.detach().clone()}
    fleet.stop_worker()
    return found


@pytest.mark.parametrize(
    "optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.long), pytest.param("adagrad", marks=pytest.mark.long)]
)
def test_ranks_train_as_one_and_their_saves_load_on_any_number(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    sizes = (1, 2, 4) if optimizer == "adam" else (1, 2)
    found = {size: ranks.run(trained, size, optimizer=optimizer, folder=str(tmp_path)) for size in sizes}
    for results in found.values():
        for result in results:
            torch.testing.assert_close(result["predicted"], found[1][0]["predicted"], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(result["top"], found[1][0]["top"], atol=1e-6, rtol=1e-5)
    rows = [
        {table.name: table.rows for table in read_manifest(Storage(f"{tmp_path}/tables-{n}")).tables} for n in sizes
    ]
    assert all(row == rows[0] for row in rows)
    # saved by one rank and loaded by two, and the reverse: both go on as one process does
    two = ranks.run(trained, 2, optimizer=optimizer, folder=str(tmp_path), loads="collective-1")
    one = ranks.run(trained, 1, optimizer=optimizer, folder=str(tmp_path), loads="collective-2")
    for name in ("predicted", "top"):
        torch.testing.assert_close(two[0][name], one[0][name], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(two[0][name], two[1][name], atol=1e-6, rtol=1e-5)


def saved_and_loaded(folder: str, state: str | None) -> dict[str, Any]:
    model, made = begin("adam", state=state)
    train(model, made, batches(STEPS))
    fleet.save(folder)
    expected = predicted(model)
    fleet.stop_worker()
    fleet.reset()
    model, _ = begin("adam", state=state)
    fleet.load(folder)
    found = predicted(model)
    fleet.stop_worker()
    return {"expected": expected, "found": found}


@pytest.mark.parametrize("state", [None, "rows"])
def test_what_state_dict_shows_of_a_table_does_not_matter_to_a_save(
    ranks: Ranks, tmp_path: Path, state: str | None
) -> None:
    for size in (1, 2):
        for result in ranks.run(saved_and_loaded, size, folder=str(tmp_path / f"{size}"), state=state):
            assert torch.equal(result["found"], result["expected"])


def loaded(folder: str) -> dict[str, Any]:
    """Load a save of servers, or of `save_persistables`, into tables on devices, and predict before and after steps."""
    model, made = begin("adam")
    fleet.load(folder)
    before = predicted(model)
    train(model, made, batches(2, seed=4))
    after = predicted(model)
    fleet.stop_worker()
    return {"before": before, "after": after}


def on_servers(dirname: str | None, folder: str) -> dict[str, torch.Tensor]:
    """The same model with its tables on two servers, in this process: loaded from a save, or trained and saved."""
    torch.manual_seed(0)
    with jobs.one_worker(
        Model(None), lambda model: torch.optim.Adam(model.parameters(), lr=0.05), servers=Servers(2)
    ) as part:
        if dirname is not None:
            for server in part.worker._servers.servers:
                load_model(server.state, dirname, None, part.job.plan.layouts)
            part.flush()
        else:
            data = batches(STEPS)
            for *inputs, target in data:
                (part.model(*inputs) - target).square().mean().backward()
                part.optimizer.step()
                part.optimizer.zero_grad()
            part.worker.save(folder, "full")
        part.model.eval()
        before = predicted(part.model)
        part.model.train()
        for *inputs, target in batches(2, seed=4):
            (part.model(*inputs) - target).square().mean().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
        part.model.eval()
        return {"before": before, "after": predicted(part.model)}


def test_saves_of_servers_and_of_devices_load_into_each_other(ranks: Ranks, tmp_path: Path) -> None:
    expected = on_servers(None, str(tmp_path / "servers"))
    for size in (1, 2):
        (found, *_) = ranks.run(loaded, size, folder=str(tmp_path / "servers"))
        torch.testing.assert_close(found["before"], expected["before"], atol=1e-6, rtol=1e-5)
    ranks.run(trained, 2, optimizer="adam", folder=str(tmp_path))
    (single, *_) = ranks.run(loaded, 1, folder=str(tmp_path / "tables-2"))
    from_device = on_servers(str(tmp_path / "tables-2"), "")
    for when in ("before", "after"):  # the state of rows is loaded too, and the network's optimizer starts anew
        torch.testing.assert_close(from_device[when], single[when], atol=1e-6, rtol=1e-5)
    inspect_model(str(tmp_path / "tables-2"), check=True, tables=[], histograms=True, top=3, as_json=False)
    compact(str(tmp_path / "tables-2"))  # full save and delta become one
    plain = fleet.load_inference_model(str(tmp_path / "tables-2"), Model(None))
    torch.testing.assert_close(predicted(plain), single["before"], atol=1e-6, rtol=1e-5)


def saved_again(folder: str) -> dict[str, Any]:
    """The folders that are left of three saves, at once and beside training."""
    model, made = begin("sgd")
    found: dict[str, Any] = {}
    for asynchronous in (False, True):
        own = f"{folder}/{asynchronous}"
        for number in (1, 2, 3):
            train(model, made, batches(1))
            assert fleet.save(own, asynchronous=asynchronous) == number
        expected = predicted(model)
        train(model, made, batches(1))
        fleet.load(own)  # waits for the save beside training
        assert torch.equal(predicted(model), expected)
        found[str(asynchronous)] = " ".join(sorted(Storage(own).folders()))
    fleet.stop_worker()
    return found


def test_the_tables_of_older_saves_are_removed(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(saved_again, 2, folder=str(tmp_path)):
        assert found == dict.fromkeys(["False", "True"], "save-000003 tables-000003")


def saved_past_a_file(folder: str) -> dict[str, Any]:
    """The folders that a save leaves which cannot write its tables, and those of the next one."""
    model, made = begin("sgd")
    train(model, made, batches(1))
    with pytest.raises(CheckpointError):
        fleet.save(folder)
    fleet.barrier_worker()  # rank 0 has removed what was there
    found = {"failed": " ".join(sorted(Storage(folder).folders()))}
    fleet.barrier_worker()
    if fleet.is_first_worker():
        Path(folder, "tables-000001").unlink()
    fleet.barrier_worker()
    fleet.save(folder)
    found["saved"] = " ".join(sorted(Storage(folder).folders()))
    fleet.stop_worker()
    return found


def test_a_save_that_cannot_write_its_tables_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "tables-000001").write_text("in the way")
    (tmp_path / "tables-000007").mkdir()  # of a save that failed before
    for found in ranks.run(saved_past_a_file, 2, folder=str(tmp_path)):
        assert found == {"failed": "", "saved": "save-000001 tables-000001"}


def gone_back(folder: str) -> dict[str, Any]:
    """Train on more ids after a save, and load it: what the tables then have, and had when they were saved."""
    model, made = begin("adam")
    train(model, made, batches(1))
    fleet.save(folder)
    train(model, made, batches(4, seed=1))
    fleet.load(folder)
    fleet.save_persistables(f"{folder}/again")
    rows = {table.name: table.rows for table in read_manifest(Storage(f"{folder}/again")).tables}
    saved = read_manifest(Storage(Storage(folder).place("tables-000001")))
    found = {"rows": rows, "saved": {table.name: table.rows for table in saved.tables}, "went_back": predicted(model)}
    fleet.stop_worker()
    return found


def only_loaded(folder: str) -> torch.Tensor:
    """What a job predicts that begins with the save."""
    model, _ = begin("adam")
    fleet.load(folder)
    expected = predicted(model)
    fleet.stop_worker()
    return expected


def test_a_load_drops_rows_that_were_created_after_the_save(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(gone_back, 2, folder=str(tmp_path))
    expected = ranks.run(only_loaded, 2, folder=str(tmp_path))
    for after, fresh in zip(found, expected, strict=True):
        assert after["rows"] == after["saved"]
        assert torch.equal(after["went_back"], fresh)


def loaded_by_views(folder: str) -> dict[str, Any]:
    """Loads where one rank cannot read the manifest: first rank 1, which need not, then rank 0."""
    model, made = begin("sgd")
    train(model, made, batches(1))
    fleet.save(folder, {"step": 1})
    manifests: Any = collective_manifest
    expected, really_read = predicted(model), manifests.read_body
    rank, texts = fleet.worker_index(), []

    def unreadable(_: Storage) -> bytes:
        raise PermissionError(folder)

    for blind in (1, 0):
        train(model, made, batches(1))
        manifests.read_body = unreadable if rank == blind else really_read
        if blind:
            assert fleet.load(folder) == {"step": 1}
            assert torch.equal(predicted(model), expected)
        else:
            with pytest.raises(CheckpointError) as error:
                fleet.load(folder)
            texts.append(str(error.value))
    fleet.stop_worker()
    return {"text": texts[0]}


def test_rank_0_tells_all_ranks_which_save_they_load(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(loaded_by_views, 2, folder=str(tmp_path)):
        assert names(found["text"], "rank 0", "PermissionError", str(tmp_path))


def test_ranks_own_the_keys_that_servers_own() -> None:
    keys = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 1000))
    for spec in (TableSpec("t", dim=2), TableSpec("t", "array", dim=2, size=1000)):
        own = keys % 1000 if spec.has_size else keys
        for num in (1, 2, 3, 7):
            assert owners(spec, own, num).tolist() == owners_of(spec, own.numpy().view(np.uint64), num).tolist()
