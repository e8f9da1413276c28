"""state_dict and load_state_dict of a distributed model, against a plain torch model of the same class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.jobs import Net, Part, Servers, fleet_optimizer, make_batch, one_worker, plain_step, worker_batches
from support.messages import naming

import torchfleet
from torchfleet.base.errors import FleetError, ModelError
from torchfleet.ps.worker.row_state import whole_rows
from torchfleet.ps.worker.row_state.table_rows import without_rows

SGD = fleet_optimizer("sgd", lr=0.1)
State = Mapping[str, torch.Tensor]


def pretrained(seed: int = 7) -> dict[str, torch.Tensor]:
    """The state of a new plain model."""
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in Net().state_dict().items()}


def assert_same_state(found: State, expected: State) -> None:
    """The same names in the same order, and the same bits."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def copied(state: State) -> dict[str, torch.Tensor]:
    """Values as they are now: those of dense parameters are the parameters themselves, as in torch."""
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_a_trained_state_makes_a_plain_model_that_predicts_alike(mode: str, tmp_path: Path) -> None:
    with one_worker(Net(), SGD, mode=mode, num_servers=2) as part:
        for batch in worker_batches(0, 5):
            part.step(batch)  # async: some of them are in the queue now
        torch.save(part.model.state_dict(), tmp_path / "model.pt")
        plain = Net()
        plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
        part.model.eval()
        with torch.no_grad():
            torch.testing.assert_close(part.model(make_batch(5)), plain(make_batch(5)), rtol=0, atol=1e-6)
        assert torch.equal(part.rows("items", range(jobs.NUM_ITEMS)), plain.items.weight)


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_a_state_that_all_workers_load_is_where_all_of_them_go_on(mode: str) -> None:
    expected = pretrained()

    def body(part: Part) -> dict[str, torch.Tensor]:
        for batch in worker_batches(part.index, 3):
            part.step(batch)
        part.model.load_state_dict(expected if part.index == 0 else pretrained(8))  # worker 0's counts
        part.barrier()
        state = copied(part.model.state_dict())
        part.barrier()
        if mode == "sync":
            part.step(make_batch(part.index))
        return state

    run = jobs.run(body, Net, SGD, mode=mode, num_workers=2, num_servers=2)
    for state in run.results:
        assert_same_state(state, expected)
    if mode == "sync":  # the next step begins with what was loaded, on servers and workers
        plain = Net()
        plain.load_state_dict(expected)
        plain_step(plain, jobs.plain_optimizers("sgd", plain, lr=0.1), jobs.combined([make_batch(0), make_batch(1)]))
        jobs.assert_equal_values(run.values(**jobs.TABLES), jobs.values_of(plain), 1e-6)


def test_a_state_that_is_loaded_before_init_worker_is_what_worker_0_begins_with() -> None:
    expected = pretrained()
    servers = Servers(2)
    part = jobs.make_part(Net, SGD, jobs.strategy(), jobs.roles(1, 2)[0])
    part.model.load_state_dict(expected)
    assert_same_state(part.model.state_dict(), expected)
    servers.make_tables(part.job)
    part.worker = jobs.Worker(part.job, servers)
    assert_same_state(part.model.state_dict(), expected)
    part.worker.stop()
    with pytest.raises(FleetError, match=naming("stop_worker()")):
        part.model.state_dict()


def test_loading_keeps_the_optimizers_state_as_torch_does() -> None:
    torch.manual_seed(0)
    plain = Net()
    rule = {"lr": 0.1, "initial_accumulator_value": 0.1}
    optimizers = jobs.plain_optimizers("adagrad", plain, **rule)
    torch.manual_seed(0)
    with one_worker(Net(), fleet_optimizer("adagrad", **rule)) as part:
        part.model.load_state_dict(plain.state_dict())
        for i, batch in enumerate(worker_batches(0, 4)):
            part.step(batch)
            plain_step(plain, optimizers, batch)
            if i == 1:
                plain.load_state_dict(pretrained())
                part.model.load_state_dict(pretrained())
        for name, value in part.model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-6)


def test_what_does_not_fit_is_told_as_torch_tells_it_and_the_servers_stay_as_they_were() -> None:
    wrong = pretrained()
    wrong["items.weight"] = wrong["items.weight"][1:]
    with one_worker(Net(), SGD) as part:
        before = copied(part.model.state_dict())
        with pytest.raises(RuntimeError, match=naming("items.weight", "[39, 4]", "[40, 4]")):
            part.model.load_state_dict(wrong)
        part.worker.communicator.flush()
        assert_same_state(part.model.state_dict(), before)
        for name, change, text in [
            ("words.weight", lambda value: value / 0, "NaN"),
            ("items.weight", lambda value: value + 1, "padding_idx=0"),
        ]:
            with pytest.raises(RuntimeError, match=text):
                part.model.load_state_dict({**before, name: change(before[name])})
        with pytest.raises(ModelError, match="assign=True"):
            part.model.load_state_dict(before, assign=True)
        state = {name: value for name, value in pretrained().items() if name != "tags.weight"}
        state["other.weight"] = torch.ones(1)
        with pytest.raises(RuntimeError, match=naming('"tags.weight"')):
            part.model.load_state_dict(state)
        missing, unexpected = part.model.load_state_dict(state, strict=False)
        assert (missing, unexpected) == (["tags.weight"], ["other.weight"])
        del state["other.weight"]
        assert_same_state(part.model.state_dict(), {**before, **state})


def test_part_of_a_model_can_be_loaded_by_itself() -> None:
    expected = pretrained()
    with one_worker(Net(), SGD, mode="async") as part:
        before = copied(part.model.state_dict())
        part.model.hidden.load_state_dict({name: expected[f"hidden.{name}"] for name in ("weight", "bias")})
        part.model.tags.load_state_dict({"weight": expected["tags.weight"]})
        part.flush()  # takes what the servers have
        loaded = {name: expected[name] for name in ("hidden.weight", "hidden.bias", "tags.weight")}
        assert_same_state(part.model.state_dict(), {**before, **loaded})


@pytest.mark.parametrize("mode", list(jobs.MODES))
def test_what_a_part_of_a_state_does_not_name_stays_as_it_was_trained(mode: str) -> None:
    with one_worker(Net(), SGD, mode=mode, num_servers=2) as part:
        for batch in worker_batches(0, 3):
            part.step(batch)
        expected = copied(part.model.state_dict())
        expected["out.bias"] = torch.tensor([0.7])
        part.model.load_state_dict({"out.bias": torch.tensor([0.7])}, strict=False)
        assert_same_state(copied(part.model.state_dict()), expected)


def test_a_model_within_another_module_is_loaded_and_saved_with_it() -> None:
    expected = {f"inner.{name}": value for name, value in pretrained().items()}
    with one_worker(Net(), SGD, mode="async") as part:
        outer = torch.nn.ModuleDict({"inner": part.model})  # as a LightningModule has it
        part.step(make_batch(0))
        outer.load_state_dict(expected)
        part.flush()
        assert_same_state(outer.state_dict(), expected)


class Declared(torch.nn.Module):
    """Embeddings of torchfleet's own: two of one table, and a dense layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torchfleet.nn.SparseEmbedding(20, name="shared", num_embeddings=50, padding_idx=3, seed=5)
        self.b = torchfleet.nn.SparseEmbedding(20, name="shared", num_embeddings=50, seed=5)
        self.norm = torch.nn.BatchNorm1d(20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(ids) + self.b(ids)).square().sum()


def test_rows_that_were_never_looked_up_are_what_the_servers_would_give_and_shared_tables_are_fetched_once() -> None:
    servers = Servers(2)
    with one_worker(Declared(), SGD, servers=servers) as part:
        part.model(torch.tensor([3, 4, 5])).backward()
        part.optimizer.step()
        part.model.norm.running_mean += 1
        walks = sum(servers.counts("WALK"))
        state = part.model.state_dict()
        assert sum(servers.counts("WALK")) == walks + len(servers)
        assert state["a.weight"] is state["b.weight"]
        assert servers.num_rows("shared") == 3  # those of b: looking at the others has made none of them
        expected = part.worker.client.pull("shared", np.arange(50)).result()
        np.testing.assert_array_equal(state["b.weight"], expected)
        loaded = {**copied(state), "norm.running_mean": torch.full((20,), 2.0)}
        part.model.load_state_dict(loaded)
        assert_same_state(part.model.state_dict(), loaded)


def test_before_init_worker_a_state_has_the_first_values_that_servers_will_give() -> None:
    servers = Servers(2)
    part = jobs.make_part(Declared, SGD, jobs.strategy(), jobs.roles(1, 2)[0])
    before = copied(part.model.state_dict())
    servers.make_tables(part.job)
    part.worker = jobs.Worker(part.job, servers)
    np.testing.assert_array_equal(before["b.weight"], part.worker.client.pull("shared", np.arange(50)).result())
    part.worker.stop()


def test_a_padding_row_that_is_nobody_elses_reads_as_zeros() -> None:
    model = torch.nn.ModuleList([torchfleet.nn.SparseEmbedding(2, num_embeddings=4, padding_idx=1)])
    with one_worker(model, SGD) as part:
        weight = part.model.state_dict()["0.weight"]
        assert not weight[1].any()
        assert weight[[0, 2, 3]].all()


class AnyIds(torch.nn.Module):
    def __init__(self, state: str | None, dim: int = 2) -> None:
        super().__init__()
        self.rows = torchfleet.nn.SparseEmbedding(dim, name="rows", state=state)
        self.out = torch.nn.Linear(dim, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.rows(ids)).sum()


def test_a_table_without_a_size_says_how_to_save_it() -> None:
    with one_worker(AnyIds(None), SGD) as part:
        with pytest.raises(ModelError, match=naming("'rows'", "fleet.save(dirname)", "state='rows'", "state='none'")):
            part.model.state_dict()
        with without_rows():
            assert len(part.model.state_dict()["rows.weight"]) == 0
    with one_worker(AnyIds("none"), SGD) as part:
        assert list(part.model.state_dict()) == ["out.weight", "out.bias"]
        part.model.load_state_dict(part.model.state_dict())
    with pytest.raises(ModelError, match=naming("state='rows'")):
        torchfleet.nn.SparseEmbedding(2, num_embeddings=3, state="rows")


@pytest.mark.parametrize("dim", [2, 16])  # rows within their map, and beside it
@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_ids_and_rows_go_out_and_come_in_as_keys_and_weight(dim: int, mode: str) -> None:
    ids = torch.tensor([7, -3, 1 << 62, 11])

    def trained(part: Part, some: torch.Tensor) -> None:
        part.model(some).backward()
        part.optimizer.step()

    with one_worker(AnyIds("rows", dim), SGD, mode=mode, num_servers=2) as part:
        assert part.model.state_dict()["rows.keys"].shape == (0,)
        trained(part, ids)
        state = copied(part.model.state_dict())
        assert state["rows.keys"].tolist() == [-3, 7, 11, 1 << 62]
        assert torch.equal(state["rows.weight"], part.rows("rows", state["rows.keys"]))
        trained(part, torch.tensor([7, 99]))  # 99 gets a row, which the state does not have
        part.model.load_state_dict(state)
        assert_same_state(part.model.state_dict(), state)
    servers = Servers(1)
    other = jobs.make_part(lambda: AnyIds("rows", dim), SGD, jobs.strategy(), jobs.roles(1, 1)[0])
    other.model.load_state_dict(state)
    servers.make_tables(other.job)
    other.worker = jobs.Worker(other.job, servers)
    assert_same_state(other.model.state_dict(), state)
    with pytest.raises(RuntimeError, match=naming("rows.keys", "int64")):
        other.model.load_state_dict({**state, "rows.keys": torch.zeros(4, dtype=torch.int64)})
    other.worker.stop()


def test_a_worker_that_was_started_again_goes_on_with_what_the_others_have_trained(capfd: Any) -> None:
    servers = Servers(1, 1)
    with one_worker(Net(), SGD, servers=servers) as part:
        part.step(make_batch(0))
        trained = copied(part.model.state_dict())
        info = dataclasses.replace(jobs.roles(1, 1)[0], restart=1)
        again = jobs.make_part(Net, SGD, jobs.strategy(), info)
        again.worker = jobs.Worker(again.job, servers)
        again.model.load_state_dict(pretrained())
        assert "load_state_dict" in capfd.readouterr().err
        assert_same_state(again.model.state_dict(), trained)


def test_a_table_that_does_not_fit_the_memory_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_worker(Net(), SGD) as part:
        monkeypatch.setattr(whole_rows, "available_bytes", lambda: 600)
        with pytest.raises(ModelError, match=naming("'items'", 40, 4)):
            part.model.state_dict()
        monkeypatch.undo()
