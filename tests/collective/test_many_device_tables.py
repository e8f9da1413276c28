"""Models of several tables on a device: those of one shape are updated, and looked up by a collection, together; the
same model with every table alone is the oracle, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchfleet as fleet
from torchfleet.base.errors import ModelError
from torchfleet.ps.gpu.table_group import TableGroup
from torchfleet.ps.worker.lookup import joined_tables

DIM, NUM = 4, 50


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of one rank on each device. Rows are numbered in the order of their keys."""
    monkeypatch.setenv("FLEET_DEVICE", request.param)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    fleet.reset()  # a test that failed has a job


def here() -> str:
    return os.environ["FLEET_DEVICE"]


class Net(torch.nn.Module):
    """Tables of two widths, one with an entry and one with a limit; `apart`: each is called by itself."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        settings: dict[str, dict[str, Any]] = {f"t{number}": {} for number in range(3)}
        settings |= {
            "bags": {"padding_idx": 3},
            "same": {"name": "t1"},
            "counted": {"entry": fleet.CountFilterEntry(2)},
        }
        settings |= {name: {"shrink": fleet.Shrink(max_rows=100)} for name in ("limited", "second")}
        settings |= {name: {"dim": 2 * DIM} for name in ("wide", "wider")}
        made = {name: fleet.nn.SparseEmbedding(**{"dim": DIM, "name": name, "device": here(), "state": "none", **own})
                for name, own in settings.items()}  # fmt: skip
        self.tables, self.apart = fleet.nn.SparseEmbeddingCollection(made), apart

    def forward(self, ids: dict[str, Any]) -> torch.Tensor:
        if self.apart:
            found = {name: self.tables[name](given) for name, given in ids.items()}
        else:
            found = self.tables(ids)
            assert list(found) == list(ids)
        return torch.stack([out.mul_(2).cos().sum() for name, out in found.items() if name != "t2"]).sum()


def batch(number: int) -> dict[str, Any]:
    random = np.random.default_rng(number)
    names = ["wide", "t0", "t1", "same", "t2", "counted", "limited", "second", "wider"]
    ids = {name: torch.from_numpy(random.integers(0, NUM + 20 * number, (8, 3))).to(here()) for name in names}
    offsets = torch.tensor([0, 0, 5, 9], device=here())
    return {**ids, "bags": (torch.from_numpy(random.integers(0, 9, 12)).to(here()), offsets)}


def trained(monkeypatch: pytest.MonkeyPatch, apart: bool, folder: Path, steps: int = 4, load: str | None = None) -> Any:
    """The saved rows of all tables: (losses, rows by table)."""
    with monkeypatch.context() as patch:
        if apart:
            patch.setattr(joined_tables, "joined", lambda *of: [])
        fleet.init(is_collective=True)
        model = fleet.distributed_model(Net(apart))
        groups = [{"params": [p for n, p in model.named_parameters()], "lr": 0.05}]
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(groups))
        if load is not None:
            fleet.load(load)
        losses = []
        for number in range(steps):
            loss = model(batch(number + (0 if load is None else 10)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        before = rows_of(model)
        assert model(batch(99)).isfinite()
        assert rows_of(model).keys() == before.keys()
        fleet.save(str(folder))
        lookups = model.tables["t0"].table_rows.engine
        sizes = sorted(len(group.members) for group in lookups.joined)
        fleet.stop_worker()
    return losses, before, sizes


def rows_of(model: Any) -> dict[str, dict[int, bytes]]:
    """By table and key: the words of its row, state included."""
    found: dict[str, dict[int, bytes]] = {}
    for name, rows in model.tables["t0"].table_rows.engine.rows.items():
        found[name] = {}
        for block in rows.table.rows():
            arrays = block.arrays()
            found[name] |= {int(key): row.tobytes() for key, row in zip(arrays["keys"], arrays["rows"], strict=True)}
    return found


def test_joined_tables_train_as_tables_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses, rows, sizes = trained(monkeypatch, False, tmp_path / "joined")
    alone = trained(monkeypatch, True, tmp_path / "alone")
    assert losses == alone[0]
    assert rows == alone[1]
    assert sizes == [2, 2, 5]  # with limits; wide ones; all others, that with an entry included
    assert alone[2] == []
    # Saves of either are continued by the other.
    after = trained(monkeypatch, False, tmp_path / "a", 2, str(tmp_path / "alone"))
    expected = trained(monkeypatch, True, tmp_path / "b", 2, str(tmp_path / "joined"))
    assert after[:2] == expected[:2]


def test_a_step_makes_one_call_per_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    find, push = TableGroup.find_and_gather, TableGroup.push

    def counted_find(self: TableGroup, asked: Any, insert: bool = False, **more: Any) -> Any:
        calls.append(("find", len(asked)))
        return find(self, asked, insert, **more)

    def counted_push(self: TableGroup, counts: Any, *more: Any) -> None:
        calls.append(("push", len(counts)))
        push(self, counts, *more)

    monkeypatch.setattr(TableGroup, "find_and_gather", counted_find)
    monkeypatch.setattr(TableGroup, "push", counted_push)
    fleet.init(is_collective=True)
    model = fleet.distributed_model(Net(False))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(0)).backward()
    optimizer.step()
    fleet.stop_worker()
    # The table with an entry, and the second lookup of t1, are looked up by themselves.
    assert sorted(calls) == [("find", 2), ("find", 2), ("find", 4), ("push", 2), ("push", 2), ("push", 5)]


def test_tables_of_different_param_groups_are_not_joined() -> None:
    fleet.init(is_collective=True)
    tables = [fleet.nn.SparseEmbedding(DIM, f"t{number}", device=here()) for number in range(4)]
    own = fleet.nn.SparseEmbedding(DIM, "own", device=here(), optimizer=fleet.optim.FTRL(lr=0.1))
    fleet.distributed_model(torch.nn.ModuleList([*tables, own]))
    weights = [table.weight for table in (*tables, own)]
    groups = [{"params": weights[:2], "lr": 0.1}, {"params": weights[2:], "lr": 0.2}]
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(groups, lr=0.3))
    ids = torch.arange(5, device=here())
    before = [table(ids).detach() for table in (*tables, own)]
    torch.stack([table(ids).sum() for table in (*tables, own)]).sum().backward()
    optimizer.step()
    lookups = tables[0].table_rows.engine
    found = [[member.table.name for member in group.members] for group in lookups.joined]
    after = [table(ids).detach() for table in (*tables, own)]
    fleet.stop_worker()
    assert found == [["t0", "t1"], ["t2", "t3"]]
    for number, rate in enumerate((0.1, 0.1, 0.2, 0.2)):
        torch.testing.assert_close(after[number], before[number] - rate, rtol=0, atol=1e-6)


def test_torch_embeddings_of_a_collection_are_replaced() -> None:
    """sparse=: nothing else is changed in the model. The oracle is plain torch."""
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    plain = torch.nn.ModuleDict({str(k): torch.nn.Embedding(NUM, DIM, sparse=True) for k in range(3)}).to(here())
    ours = fleet.nn.SparseEmbeddingCollection({str(k): torch.nn.Embedding(NUM, DIM, sparse=True) for k in range(3)})
    ours.load_state_dict(plain.state_dict())
    ids = {str(k): torch.arange(5, device=here()) * (k + 1) for k in range(3)}
    model = fleet.distributed_model(ours, sparse=here())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        torch.stack([out.square().sum() for out in model(ids).values()]).sum().backward()
        torch.stack([plain[name](given).square().sum() for name, given in ids.items()]).sum().backward()
        for stepper in (optimizer, oracle):
            stepper.step()
            stepper.zero_grad()
    found, expected = model.state_dict(), plain.state_dict()
    fleet.stop_worker()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.cpu(), rtol=0, atol=1e-6)


def test_ids_for_an_unknown_name_are_refused() -> None:
    tables = fleet.nn.SparseEmbeddingCollection({"a": fleet.nn.SparseEmbedding(DIM, "a", device="cpu")})
    with pytest.raises(ModelError, match=r"\['a'\].*\['b'\]"):
        tables({"b": torch.arange(3)})
