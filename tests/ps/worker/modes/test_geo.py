"""The geo mode: with one worker, local SGD; with several, differences that add up to what the servers hold."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.cases import each_of
from support.grids import first_of
from support.jobs import TABLES, Net, Part, Servers, assert_equal_values, fleet_optimizer, one_worker
from support.messages import naming
from test_communicator import STEPS, TOLERANCE, plain, train

import torchfleet
from torchfleet.base.errors import StrategyError
from torchfleet.ps.net.wire import DELTA
from torchfleet.ps.worker.client.client import Client

WORKERS = 3
SGD = fleet_optimizer("sgd", lr=0.1)


class Rows(torch.nn.Module):
    """Loss = Σ rows · weight: the gradient of a row is `weight`, whatever it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torchfleet.nn.SparseEmbedding(2, name="rows")

    def forward(self, ids: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        return self.rows(ids).sum() * weight


def step(part: Part, ids: list[int], weight: float = 1.0) -> None:
    part.model(torch.tensor(ids), weight).backward()
    part.optimizer.step()
    part.optimizer.zero_grad()


def meet(part: Part) -> None:
    """As a barrier, which here exchanges nothing."""
    part.worker.client.barrier("a test", part.job.info.num_workers, jobs.SECONDS)


def settle(part: Part) -> None:
    """An exchange as after k_steps."""
    part.worker.communicator.settle()


def let_exchange(communicator: Any) -> None:
    """Wait for the answer to the exchange that is under way; the next step takes it in."""
    jobs.wait_until(lambda: not communicator._back.empty() or not communicator._under_way, "the answer is here")


def exchange_all(part: Part) -> None:
    """Everybody's differences are on the servers, then everybody has them."""
    for _ in range(2):
        settle(part)
        meet(part)


def local(part: Part, table: str, ids: list[int]) -> torch.Tensor:
    """What this worker's own copy holds; zeros where it has no row."""
    communicator: Any = part.worker.communicator
    return torch.from_numpy(communicator._local[table].pull(np.array(ids, np.uint64), create=False))


# One worker


@each_of("k_steps", [1, 3, 7, 100])
@each_of("num_servers", [1, 2])
def test_one_worker_equals_local_sgd(k_steps: int, num_servers: int) -> None:
    """1e-6, as in test_communicator.py. What is sent is x - b and the servers add it to b, rounded twice: their rows
    may differ from the worker's by that, and the worker takes theirs over only where others changed them."""
    done = jobs.run(train, Net, SGD, mode="geo", num_servers=num_servers, k_steps=k_steps)
    model = done.parts[0].model
    assert_equal_values(
        {name: p.detach() for name, p in model.named_parameters() if len(p)},
        {name: value for name, value in plain("sgd", 1).items() if name not in TABLES},
        TOLERANCE,
    )
    assert_equal_values(done.values(**TABLES), plain("sgd", 1), TOLERANCE)


def test_one_worker_with_momentum_on_the_dense_parameters_equals_local_sgd() -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        dense, sparse = jobs.split_parameters(model)
        return torch.optim.SGD([{"params": dense, "momentum": 0.9}, {"params": sparse}], lr=0.05)

    done = jobs.run(train, Net, make, mode="geo", num_servers=2, k_steps=3)
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    for batch in jobs.worker_batches(0, STEPS):
        jobs.plain_step(model, [optimizer], batch)
    assert_equal_values(done.values(**TABLES), jobs.values_of(model), TOLERANCE)


def test_one_worker_with_prefetch_equals_local_sgd() -> None:
    def body(part: Part) -> None:
        for batch in part.prefetch(jobs.worker_batches(0, STEPS)):
            part.step(batch)

    done = jobs.run(body, Net, SGD, mode="geo", num_servers=2, k_steps=2)
    assert_equal_values(done.values(**TABLES), plain("sgd", 1), TOLERANCE)


def test_nothing_is_sent_between_two_exchanges() -> None:
    servers = Servers(2)
    with one_worker(Rows(), mode="geo", servers=servers, k_steps=3) as part:
        first = jobs.first_rows(part, "rows", [1])
        step(part, [1])
        step(part, [1])
        assert servers.counts("PUSH") == [0, 0]
        assert torch.equal(part.rows("rows", [1]), first)
        torch.testing.assert_close(local(part, "rows", [1]), first - 1.0, rtol=0, atol=1e-6)
        step(part, [1])
        jobs.wait_until(lambda: servers.counts("PUSH") == [1, 1], "the third step sends")
        part.flush()
        torch.testing.assert_close(part.rows("rows", [1]), first - 1.5, rtol=0, atol=1e-6)


def test_training_goes_on_while_an_exchange_is_under_way() -> None:
    servers = Servers()
    with one_worker(Rows(), mode="geo", servers=servers, k_steps=1) as part:
        first = jobs.first_rows(part, "rows", [1])
        servers.hold_pushes()
        for _ in range(5):
            step(part, [1])  # would hang if a step waited for its exchange
        torch.testing.assert_close(local(part, "rows", [1]), first - 2.5, rtol=0, atol=1e-6)
        servers.release_pushes()
        part.flush()
        torch.testing.assert_close(part.rows("rows", [1]), first - 2.5, rtol=0, atol=1e-6)


# Several workers


@pytest.fixture
def deltas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Every difference that any client sends."""
    sent: list[dict[str, Any]] = []
    lock = threading.Lock()
    push_tables = Client.push_tables

    def recording(self: Client, grads: Any, *arguments: Any, **named: Any) -> Any:
        if named.get("flags") == DELTA:
            with lock:
                sent.append(
                    {
                        name: tuple(part.copy() for part in block) if isinstance(block, tuple) else block.copy()
                        for name, block in grads.items()
                    }
                )
        return push_tables(self, grads, *arguments, **named)

    monkeypatch.setattr(Client, "push_tables", recording)
    return sent


@pytest.mark.parametrize(("k_steps", "num_servers"), [(1, 2), (3, 1), (4, 3)])
def test_the_servers_hold_the_first_values_and_all_differences(
    deltas: list[dict[str, Any]], k_steps: int, num_servers: int
) -> None:
    """Summed here in float64; the servers add in float32, one rounding (6e-8) for each of some 40 differences.

    The training waits after every fourth exchange that is due: on busy cores its thread might have no turn else."""

    def train_and_let_exchange(part: Part) -> None:
        communicator: Any = part.worker.communicator
        for number, batch in enumerate(jobs.worker_batches(part.index, STEPS), 1):
            part.step(batch)
            if number % (4 * k_steps) == 0:
                let_exchange(communicator)

    done = jobs.run(
        train_and_let_exchange, Net, SGD, mode="geo", num_workers=WORKERS, num_servers=num_servers, k_steps=k_steps
    )
    torch.manual_seed(0)
    first = jobs.values_of(Net())
    expected = {name: first[name].double().clone() for name in TABLES}
    names = [name for name in first if name not in TABLES]
    dense = torch.cat([first[name].reshape(-1) for name in names]).double()
    for sent in deltas:
        dense += torch.from_numpy(sent["dense.0"]).double()
        for name in TABLES:
            keys, rows = sent[name]
            expected[name].index_add_(0, torch.from_numpy(keys.astype(np.int64)), torch.from_numpy(rows).double())
    assert len(deltas) >= WORKERS * (1 + STEPS // k_steps // 4)
    tables = [done.servers.table("dense.0", i) for i in range(num_servers)]
    held = np.concatenate([table.get(0, table.size) for table in tables])
    torch.testing.assert_close(torch.from_numpy(held).double(), dense, rtol=0, atol=5e-6)
    for name, num in TABLES.items():
        torch.testing.assert_close(done.rows(name, num).double(), expected[name], rtol=0, atol=5e-6)


def test_workers_that_changed_a_row_alike_move_it_as_one_would() -> None:
    """Differences are divided by the number of workers: three times the same step is that step."""

    def body(part: Part) -> torch.Tensor:
        step(part, [1, 2])
        settle(part)
        meet(part)
        held = part.rows("rows", [1, 2])
        meet(part)
        return held

    done = jobs.run(body, Rows, jobs.sgd, mode="geo", num_workers=WORKERS, num_servers=2, k_steps=100)
    first = jobs.first_rows(done.parts[0], "rows", [1, 2])
    for held in done.results:
        torch.testing.assert_close(held, first - 0.5, rtol=0, atol=1e-6)


def train_and_settle(part: Part) -> dict[str, torch.Tensor]:
    """Train, take in all rows that anybody trained, and exchange until nothing can be left to send.

    A worker sends a third of its difference and keeps the rest for the next exchange: after 40 of them there is
    (2/3)^40 = 1e-7 of it."""
    for batch in jobs.worker_batches(part.index, STEPS):
        part.step(batch)
    for batch in (b for i in range(WORKERS) for b in jobs.worker_batches(i, STEPS)):
        part.model(batch)
    part.optimizer.zero_grad()
    for _ in range(41):
        settle(part)
        meet(part)
    dense = {name: p.detach().clone() for name, p in part.model.named_parameters() if len(p)}
    return {**dense, "items": local(part, "items", list(range(1, jobs.NUM_ITEMS // 2)))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense parameters", "rows"])
def test_after_exchanges_of_all_every_worker_and_the_servers_hold_the_same(kind: str) -> None:
    done = jobs.run(train_and_settle, Net, SGD, mode="geo", num_workers=WORKERS, num_servers=2, k_steps=4)
    held = done.values(items=jobs.NUM_ITEMS // 2)
    held["items"] = held["items"][1:]
    for found in (*done.results, held):
        chosen = {name: value for name, value in found.items() if (name == "items") == (kind == "rows")}
        assert_equal_values(chosen, {name: done.results[0][name] for name in chosen}, 1e-5)


def test_a_row_that_another_worker_trained_comes_in_with_the_next_exchange() -> None:
    trained, looked = threading.Event(), threading.Event()

    def body(part: Part) -> torch.Tensor | None:
        step(part, [5], weight=0.0)  # both hold row 5
        part.barrier()
        meet(part)  # a barrier ends with an exchange: it is over in both
        if part.index == 0:
            step(part, [5], weight=2.0)
            settle(part)
            trained.set()
            assert looked.wait(jobs.SECONDS)
            return None
        assert trained.wait(jobs.SECONDS)
        before = local(part, "rows", [5])
        settle(part)
        after = local(part, "rows", [5])
        looked.set()
        return after - before

    done = jobs.run(body, Rows, jobs.sgd, mode="geo", num_workers=2, num_servers=2, k_steps=100)
    torch.testing.assert_close(done.results[1], torch.full((1, 2), -0.5 * 2.0 / 2), rtol=0, atol=1e-6)


def test_own_progress_since_the_last_exchange_is_kept_when_others_come_in() -> None:
    def body(part: Part) -> torch.Tensor:
        step(part, [5], weight=0.0)
        part.barrier()
        step(part, [5], weight=1.0 + part.index)
        exchange_all(part)
        return local(part, "rows", [5])

    done = jobs.run(body, Rows, jobs.sgd, mode="geo", num_workers=2, k_steps=100)
    first = jobs.first_rows(done.parts[0], "rows", [5])
    # Worker w moved by -0.5 (1 + w). After the first exchange each has sent half of that, after the second half of the
    # rest, and has taken in what the other had sent by then.
    own = [-0.5, -1.0]
    for worker in (0, 1):
        rest = own[worker] * 0.25  # not sent yet
        low, high = first + (own[0] + own[1]) * 0.5 + rest, first + (own[0] + own[1]) * 0.75 + rest
        found = done.results[worker]
        assert (found <= low + 1e-6).all()
        assert (found >= high - 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_of([1, 2, 3]))
def test_geo_learns_what_sync_learns(seed: int) -> None:
    """In the end a worker's whole difference is added, not the mean over workers as in sync: geo at rate 1 moves like
    sync at rate 3. Workers of geo exchange in turns, after five steps each, so that every run ends with the same loss
    and AUC on held-out rows, which are within 0.02 of those of sync: about 0.51 and 0.835. An untrained model has 0.69
    and 0.5."""
    batches, turns = jobs.click_batches(seed, 150), jobs.Turns(WORKERS)

    def train(part: Part, batches: Sequence[jobs.Batch]) -> None:
        for batch in batches:
            jobs.click_step(part.model, [part.optimizer], batch)

    def in_step(part: Part) -> tuple[float, float]:
        train(part, batches[part.index :: WORKERS])
        part.barrier()
        return jobs.click_scores(part.model)

    def in_turns(part: Part) -> tuple[float, float]:
        own = batches[part.index :: WORKERS]
        for first in range(0, len(own), 5):
            with turns.of(part, settle):
                train(part, own[first : first + 5])
        exchange_all(part)
        return jobs.click_scores(part.model)

    options: dict[str, Any] = {"num_workers": WORKERS, "num_servers": 2}
    sync = jobs.run(in_step, jobs.Clicks, fleet_optimizer("sgd", lr=1.0 * WORKERS), mode="sync", **options).results[0]
    geo = jobs.run(in_turns, jobs.Clicks, fleet_optimizer("sgd", lr=1.0), mode="geo", k_steps=1000, **options).results
    assert sync[1] > 0.82
    for found in geo:
        assert found == pytest.approx(sync, abs=0.02)


# Prediction


def test_prediction_reads_rows_that_only_others_trained_without_keeping_them() -> None:
    def body(part: Part) -> list[torch.Tensor]:
        step(part, [part.index, 10 + part.index])
        settle(part)
        meet(part)
        part.model.eval()
        seen = [part.model.rows(torch.tensor([0, 1, 99])).detach()]
        pulls = part.worker.client.stats()[0]["requests"]
        meet(part)
        if part.index == 0:  # worker 0 moves its row on; worker 1 must read the new value, not a kept one
            part.model.train()
            step(part, [0], weight=4.0)
            part.flush()
        meet(part)
        part.model.eval()
        part.optimizer.zero_grad()
        part.model(torch.tensor([7]))  # another batch
        seen.append(part.model.rows(torch.tensor([0, 1, 99])).detach())
        assert part.worker.client.stats()[0]["requests"] > pulls
        meet(part)  # who ends sends what is left over
        return seen

    done = jobs.run(body, Rows, jobs.sgd, mode="geo", num_workers=2, num_servers=2, k_steps=100)
    first = jobs.first_rows(done.parts[0], "rows", [0, 1])
    before, after = done.results[1]
    torch.testing.assert_close(before[0], first[0] - 0.25, rtol=0, atol=1e-6)  # as the servers have it: halved
    torch.testing.assert_close(before[1], first[1] - 0.5, rtol=0, atol=1e-6)  # its own, as it trained it
    assert not before[2].any()
    # Worker 0's row on the servers: half of 0.5, then half of the other 0.25 + 2.0
    torch.testing.assert_close(after[0], first[0] - 0.25 - 1.125, rtol=0, atol=1e-6)
    assert not after[2].any()
    assert done.servers.num_rows("rows") == 4
    communicator: Any = done.parts[1].worker.communicator
    held = communicator._local["rows"].absent(np.array([0, 1, 11, 99, 7], np.uint64))
    assert sorted(held.tolist()) == [0, 7, 99], "a prediction must leave no rows in the local copy"


# Only SGD, and schedules


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.AdamW])
def test_only_sgd_is_accepted(kind: type[torch.optim.Optimizer]) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return kind(jobs.split_parameters(model)[0] + jobs.split_parameters(model)[1], lr=0.1, weight_decay=0.0)

    with pytest.raises(StrategyError, match=naming("k_steps=5", "SGD", kind.__name__, "k_steps=0")):
        jobs.make_part(Net, make, jobs.strategy("geo", k_steps=5), jobs.roles(1, 1)[0])


@pytest.mark.parametrize(("mode", "steps_each"), [("sync", 1), ("half_async", 1), ("async", 1), ("geo", 4)])
def test_a_distributed_scheduler_counts_global_steps_in_geo(mode: str, steps_each: int) -> None:
    """A schedule over global steps, of which each worker makes a fourth."""
    with jobs.clean_facade():
        torchfleet.init(torchfleet.UserDefinedRoleMaker(1, worker_num=4, server_endpoints=["127.0.0.1:1"]))
        model = torchfleet.distributed_model(Net())
        optimizer = torchfleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), jobs.strategy(mode))
        made = torch.optim.lr_scheduler.StepLR(optimizer, 8, gamma=0.5)
        scheduler = torchfleet.distributed_scheduler(made)
        assert scheduler is made
        rates = []
        for _ in range(9):
            optimizer._opt_called = True  # what the scheduler looks at; there are no servers here
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert scheduler.last_epoch == 9 * steps_each
    assert rates == [0.5 ** (steps_each * (i + 1) // 8) for i in range(9)]


def test_a_distributed_scheduler_before_the_strategy_is_known_does_not_count_wrongly() -> None:
    """Made on the inner optimizer and handed over first: an error that says the order, or the right count."""
    with jobs.clean_facade():
        torchfleet.init(torchfleet.UserDefinedRoleMaker(1, worker_num=4, server_endpoints=["127.0.0.1:1"]))
        model = torchfleet.distributed_model(Net())
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with contextlib.suppress(torchfleet.FleetError):  # refused is good as well
            scheduler = torchfleet.distributed_scheduler(torch.optim.lr_scheduler.StepLR(inner, 8))
            torchfleet.distributed_optimizer(inner, jobs.strategy("geo"))
            inner._opt_called = True
            scheduler.step()
            assert scheduler.last_epoch == 4


def test_a_schedule_reaches_the_local_copies() -> None:
    def body(part: Part) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(part.optimizer, 1, gamma=0.5)
        for _ in range(3):
            step(part, [1])
            scheduler.step()

    done = jobs.run(body, Rows, jobs.sgd, mode="geo", k_steps=2)
    first = jobs.first_rows(done.parts[0], "rows", [1])
    torch.testing.assert_close(done.rows("rows", 2)[1:], first - 0.5 * 1.75, rtol=0, atol=1e-6)


def test_exchanges_are_counted() -> None:
    with one_worker(Rows(), mode="geo", k_steps=2) as part:
        communicator: Any = part.worker.communicator
        for _ in range(4):
            step(part, [1])
            let_exchange(communicator)
        step(part, [1])
        part.flush()
        part.flush()
        assert part.stats()["exchanges"] == 3  # after steps 2 and 4, and the first flush
        assert part.stats()["steps"] == 5
