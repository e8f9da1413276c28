"""How long a lookup's rows are good for: in training for the step, in prediction for the call, and nothing is kept
beyond that. A model of two towers, called as a whole and each tower by itself."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Part, Servers, one_worker

import torchfleet
from torchfleet.ps.net.wire import DELTA
from torchfleet.ps.tables.settings.policy import ShowClickEntry
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.lookup.batch_rows import BatchRows

NUM_USERS, NUM_ITEMS, DIM = 30, 20, 3


class Tower(torch.nn.Module):
    def __init__(self, rows: torch.nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.out = torch.nn.Linear(DIM, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.rows(ids))


class Towers(torch.nn.Module):
    def __init__(self, declared: bool = False) -> None:
        super().__init__()
        if declared:
            tables: list[torch.nn.Module] = [
                torch.nn.Embedding(num, DIM, sparse=True) for num in (NUM_USERS, NUM_ITEMS)
            ]
        else:
            tables = [torchfleet.nn.SparseEmbedding(DIM, name=name) for name in ("users", "items")]
        self.user, self.item = Tower(tables[0]), Tower(tables[1])

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.user(users) * self.item(items)).sum(dim=1)


@pytest.fixture
def rows_held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many rows lookups have in memory, wherever they are referred to."""
    made: weakref.WeakSet[BatchRows] = weakref.WeakSet()
    init = BatchRows.__init__

    def noted(rows: BatchRows, *arguments: Any) -> None:
        init(rows, *arguments)
        made.add(rows)

    monkeypatch.setattr(BatchRows, "__init__", noted)
    return lambda: sum(len(rows.keys) for rows in made)


@contextmanager
def prediction(model: torch.nn.Module, how: str) -> Iterator[None]:
    if how == "no_grad":
        with torch.no_grad():
            yield
        return
    model.eval()
    yield
    model.train()


def train_users(part: Part, ids: torch.Tensor) -> None:
    part.model(ids, ids).sum().backward()
    part.optimizer.step()
    part.optimizer.zero_grad()


def update_by_another(part: Part, table: str, ids: torch.Tensor) -> None:
    """1 is added to every number of these rows by another client, and what is to come from it is here."""
    other = Client(part.worker._servers.connect(), worker=1)
    other.attach(part.job.plan.sparse[table].spec)
    other.push_tables({table: (ids.numpy(), np.ones((len(ids), DIM), np.float32))}, flags=DELTA).result()
    other.close()
    part.flush()


CALLS: dict[str, Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]] = {
    "the embedding": lambda model, ids: model.user.rows(ids),
    "a tower": lambda model, ids: model.user(ids),
    "the model": lambda model, ids: model(ids, ids),
    "the model's forward": lambda model, ids: model.forward(ids, ids),
}


# Prediction


@each_of("how", ["eval", "no_grad"])
@each_of("mode", ["sync", "half_async", "async", "geo", "hybrid"])
def test_prediction_reads_what_others_have_written_since_the_last_call(mode: str, how: str) -> None:
    ids = torch.tensor([1, 2, 3])
    with one_worker(Towers(), mode=mode, num_servers=2) as part:
        train_users(part, ids)
        part.flush()
        with prediction(part.model, how):
            for call in [*CALLS.values()] * 2:
                before = call(part.model, ids).detach()
                rows = part.model.user.rows(ids).detach()
                update_by_another(part, "users", ids)
                torch.testing.assert_close(part.model.user.rows(ids).detach(), rows + 1, rtol=0, atol=1e-6)
                assert not torch.equal(call(part.model, ids).detach(), before)


def test_a_prediction_between_forward_and_step_reads_the_servers_and_leaves_the_step_alone() -> None:
    ids = torch.tensor([1, 2, 3])
    with one_worker(Towers(), mode="half_async") as part:
        out = part.model.user.rows(ids)
        with torch.no_grad():
            update_by_another(part, "users", ids)
            torch.testing.assert_close(part.model.user.rows(ids), out.detach() + 1, rtol=0, atol=1e-6)
        assert torch.equal(part.model.user.rows(ids), out), "the rows of this step"
        out.sum().backward()
        part.optimizer.step()
        first = jobs.first_rows(part, "users", ids.tolist())
        torch.testing.assert_close(part.rows("users", ids), first + 1 - 0.5, rtol=0, atol=1e-6)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_the_hundredth_prediction_pulls_and_keeps_what_the_first_did(
    how: str, call: Callable[..., Any], rows_held: Callable[[], int]
) -> None:
    servers = Servers()
    with one_worker(Towers(), servers=servers, mode="half_async") as part:
        pulls, pulled, held = [], [0], []
        pull = part.worker.communicator.pull

        def counted(keys: dict[str, Any], create: bool) -> Any:
            pulled[-1] += sum(len(wanted) for wanted in keys.values())
            return pull(keys, create)

        part.worker.communicator.pull = counted
        with prediction(part.model, how):
            for i in range(100):
                before = servers.counts("PULL")[0]
                call(part.model, torch.arange(20 * i, 20 * (i + 1)))
                pulls.append(servers.counts("PULL")[0] - before)
                pulled.append(0)
                held.append(rows_held())
        assert pulls[1:] == [pulls[1]] * 99
        assert pulls[1] <= pulls[0]
        assert pulled[:100] == [pulled[0]] * 100
        assert held == [0] * 100


def test_calls_of_a_tower_without_a_step_keep_no_rows_of_results_that_are_gone(rows_held: Callable[[], int]) -> None:
    with one_worker(Towers(), mode="half_async") as part:
        for i in range(20):
            out = part.model.user(torch.arange(10 * i, 10 * (i + 1)))  # in train mode, with gradients
            assert rows_held() == 10
        del out
        assert rows_held() == 0


def test_a_model_call_that_fails_ends_its_batch(rows_held: Callable[[], int]) -> None:
    ids = torch.tensor([1, 2])
    with one_worker(Towers(), mode="half_async") as part:
        train_users(part, ids)
        part.model.eval()
        with pytest.raises(RuntimeError, match="must match the size"):
            part.model(ids, torch.tensor([1, 2, 3]))
        rows = part.model.user.rows(ids).detach()
        update_by_another(part, "users", ids)
        torch.testing.assert_close(part.model.user.rows(ids).detach(), rows + 1, rtol=0, atol=1e-6)
        assert rows_held() == 0


def test_another_thread_predicts_with_rows_of_its_own() -> None:
    ids = torch.tensor([1, 2])
    with one_worker(Towers(), mode="half_async") as part:
        train_users(part, ids)
        out = part.model.user.rows(ids)  # rows of this thread's step
        update_by_another(part, "users", ids)

        def predict(_: int) -> torch.Tensor:
            with torch.no_grad():
                found = part.model.user.rows(ids)
            part.worker.communicator.leave_thread()
            return found

        assert torch.equal(jobs.in_threads(predict, 1)[0], out.detach() + 1)
        part.optimizer.zero_grad()


def test_a_loaded_model_reads_its_tables_as_they_are_and_keeps_no_rows(
    tmp_path: Path, rows_held: Callable[[], int]
) -> None:
    ids = torch.arange(NUM_USERS)
    with one_worker(Towers(declared=True)) as part:
        part.worker.save(str(tmp_path), "inference")
    model = torchfleet.load_inference_model(str(tmp_path), Towers(declared=True))
    tables = model.user.rows._engine._source._tables
    for call in CALLS.values():
        small = ids[:10]
        before, rows = call(model, small).detach(), model.user.rows(small).detach()
        tables["user.rows"].add(small.numpy().astype(np.uint64), np.ones((10, DIM), np.float32))
        assert torch.equal(model.user.rows(small).detach(), rows + 1)
        assert not torch.equal(call(model, small).detach(), before)
        del before, rows
        assert rows_held() == 0


# Training


def towers_step(model: Any, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """The loss of in-batch negatives: both towers are called by themselves, the user's twice."""
    scores = model.user(users) @ model.item(items).T
    again = model.user(users.flip(0)[: len(users) // 2])
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(users))) + again.square().mean()


@each_of("prefetch", [False, True])
@each_of("per_step", [1, 3])
@each_of("mode", ["sync", "half_async", "geo"])
def test_towers_called_by_themselves_train_to_the_result_of_torch(mode: str, per_step: int, prefetch: bool) -> None:
    rng = np.random.default_rng(0)
    batches = [
        {"users": torch.from_numpy(rng.integers(0, NUM_USERS, 8)), "items": torch.from_numpy(rng.integers(0, 20, 8))}
        for _ in range(12)
    ]
    torch.manual_seed(0)
    model = Towers(declared=True)
    plain = copy.deepcopy(model)

    def train(model: Any, optimizer: Any, loader: Any) -> None:
        for number, batch in enumerate(loader):
            towers_step(model, **batch).backward()
            if number % per_step == per_step - 1:
                model.eval()
                with torch.no_grad():  # measured in between
                    model.user(batch["users"])
                model.train()
                optimizer.step()
                optimizer.zero_grad()

    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches)
    with one_worker(model, lambda made: jobs.sgd(made, lr=0.1), mode=mode, num_servers=2) as part:
        train(part.model, part.optimizer, part.prefetch(batches) if prefetch else batches)
        part.flush()
        for name, num, tower in (("user.rows", NUM_USERS, plain.user), ("item.rows", NUM_ITEMS, plain.item)):
            torch.testing.assert_close(part.rows(name, range(num)), tower.rows.weight.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(part.model.user.out.weight, plain.user.out.weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["half_async", "async"])
def test_towers_over_prefetched_batches_take_one_pull_a_step(mode: str) -> None:
    servers = Servers(2)
    batches = [(torch.arange(8) + 8 * i, torch.arange(8) + 100 * i) for i in range(12)]
    configs = {"max_staleness": 0} if mode == "async" else {}
    with one_worker(Towers(), servers=servers, mode=mode, **configs) as part:
        before = 0
        for number, (users, items) in enumerate(part.prefetch(batches)):
            towers_step(part.model, users, items).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            if number == 4:
                before = servers.counts("PULL")[0]
        ahead = mode == "async"  # the pull of the batch after number 4 was made before it was counted
        network = 7 * ahead  # async has a pull of its own for it
        assert servers.counts("PULL") == [before + 7 - ahead + network] * 2


def test_rows_of_a_step_are_pulled_once_and_those_of_the_next_step_anew() -> None:
    servers = Servers()
    ids = torch.tensor([1, 2, 3])
    with one_worker(Towers(), servers=servers, mode="half_async") as part:
        for _ in range(3):
            before = servers.counts("PULL")[0]
            outs = [part.model.user(ids) for _ in range(4)]
            assert servers.counts("PULL")[0] == before + 1
            sum(out.sum() for out in outs).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            update_by_another(part, "users", ids)
            assert torch.equal(part.model.user.rows(ids).detach(), part.rows("users", ids))
            part.optimizer.step()


def test_a_tower_called_beside_the_model_shares_the_rows_of_the_step() -> None:
    servers = Servers()
    ids = torch.tensor([1, 2, 3])
    with one_worker(Towers(), servers=servers, mode="half_async") as part:
        for number in range(4):
            before = servers.counts("PULL")[0]
            loss = part.model(ids, ids).sum() + part.model.user(ids).sum()
            assert servers.counts("PULL")[0] == before + (2 if number == 0 else 1), "foreseen after the first"
            loss.backward()
            part.optimizer.step()
            part.optimizer.zero_grad()


def test_rows_that_outlive_their_batch_are_not_taken_for_ids_that_lie_in_its_place() -> None:
    memory = np.arange(4)
    with one_worker(Towers(), mode="half_async") as part:
        train_users(part, torch.arange(4))  # from now on foreseen
        out = part.model(torch.from_numpy(memory), torch.arange(4))
        again = part.model(torch.arange(4), torch.arange(4))
        memory[:] = [7, 8, 9, 10]  # as when freed memory is used again
        found = part.model.user.rows(torch.from_numpy(memory))
        assert torch.equal(found.detach(), jobs.first_rows(part, "users", [7, 8, 9, 10]))
        (out.sum() + again.sum() + found.sum()).backward()
        part.optimizer.step()


def test_prefetched_rows_serve_one_prediction_and_the_next_one_reads_anew(rows_held: Callable[[], int]) -> None:
    servers = Servers()
    batches = [torch.arange(4) + 4 * i for i in range(8)]
    with one_worker(Towers(), servers=servers, mode="half_async") as part:
        train_users(part, torch.cat(batches))
        part.model.eval()
        for number, ids in enumerate(part.prefetch(batches)):
            before = servers.counts("PULL")[0]
            rows = part.model.user.rows(ids).detach()
            assert servers.counts("PULL")[0] == before + 1
            update_by_another(part, "users", ids)
            again = part.model.user.rows(ids).detach()
            assert torch.equal(again, rows + 1), f"batch {number}"
            assert torch.equal(part.model.user.rows(ids.clone()).detach(), again)
        assert rows_held() == 0, "the loop is over"


def test_prefetched_batches_are_predicted_by_towers_with_one_pull_each() -> None:
    servers = Servers()
    batches = [(torch.arange(4) + 4 * i, torch.arange(4) + 50 * i) for i in range(8)]
    with one_worker(Towers(), servers=servers, mode="async") as part:
        part.model.eval()
        with torch.no_grad():
            for number, (users, items) in enumerate(part.prefetch(batches)):
                part.model.user(users), part.model.item(items)
                if number == 2:
                    before = servers.counts("PULL")[0]
        assert servers.counts("PULL")[0] == before + 4  # of batches 4 to 7: that of 3 was sent ahead


# Training and prediction of one table in one call


class Mixed(torch.nn.Module):
    """Reads its rows without gradients, too, before it trains on them or after."""

    def __init__(self, order: str, **options: Any) -> None:
        super().__init__()
        self.rows = torchfleet.nn.SparseEmbedding(DIM, name="rows", **options)
        self.order = order

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.order == "read first":
            with torch.no_grad():
                read = self.rows(ids)
            return self.rows(ids), read
        trained = self.rows(ids)
        with torch.no_grad():
            return trained, self.rows(ids)


@each_of("order", ["read first", "train first"])
@each_of("mode", ["sync", "half_async", "async", "geo", "hybrid"])
def test_a_read_without_gradients_does_not_make_training_begin_from_zeros(mode: str, order: str) -> None:
    with one_worker(Mixed(order), mode=mode) as part:
        for number in range(4):
            ids = torch.arange(5) + 5 * number  # new ones in every step
            trained, read = part.model(ids)
            first = jobs.first_rows(part, "rows", ids.tolist())
            assert torch.equal(trained.detach(), first), f"step {number}"
            assert torch.equal(read, first) or not read.any()
            trained.sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            part.flush()
            torch.testing.assert_close(part.rows("rows", ids), first - 0.5, rtol=0, atol=1e-6)


def test_gradients_of_eval_mode_and_of_training_are_summed_where_shows_travel_with_them() -> None:
    """Rows of the two come by themselves, only those of training with shows and clicks."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            entry = ShowClickEntry("show", "click")
            self.one = torchfleet.nn.SparseEmbedding(DIM, name="rows", entry=entry)
            self.two = torchfleet.nn.SparseEmbedding(DIM, name="rows", entry=entry)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.two(batch["ids"]).sum() + 10 * self.one(batch["ids"]).sum()

    ids = torch.tensor([1, 2])
    batch = {"ids": ids, "show": torch.ones(2), "click": torch.zeros(2)}
    with one_worker(Both(), mode="half_async") as part:
        for number in range(3):
            if number:
                part.model.two.eval()
            part.model(batch).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            expected = jobs.first_rows(part, "rows", [1, 2]) - 0.5 * 11 * (number + 1)
            torch.testing.assert_close(part.rows("rows", ids), expected, rtol=0, atol=1e-5)
