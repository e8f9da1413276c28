"""half_async and async: against torch where one worker makes the order known, against local
training to a stated tolerance where it does not; and every setting of a_sync_configs doing what its name says.

The tolerance of comparisons with torch is that of test_communicator.py, for the reasons given there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import jobs
from support.cases import each_of
from support.grids import first_of
from support.jobs import TABLES, Net, Part, Servers, assert_equal_values, fleet_optimizer, one_worker, wait_until
from support.messages import naming
from test_communicator import RULES, STEPS, TOLERANCE, plain, train

import torchfleet
from torchfleet.base.errors import FleetError, ServerUnreachable, TableError

WORKERS = 3


class Linear(torch.nn.Module):
    """Loss = Σ w + Σ rows: the gradient of every number is 1, whatever the values are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4))
        self.rows = torchfleet.nn.SparseEmbedding(2, name="rows", initializer=torchfleet.nn.Constant(0.0))

    def forward(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        return self.w.sum() if ids is None else self.w.sum() + self.rows(ids).sum()


def step(part: Part, ids: torch.Tensor | None = None) -> None:
    part.model(ids).backward()
    part.optimizer.step()
    part.optimizer.zero_grad()


def sent(part: Part) -> int:
    return int(part.worker.communicator.stats()["pushes"])


def test_requests_that_threads_sent_again_count_among_those_of_the_worker() -> None:
    with one_worker(Linear(), mode="async", max_staleness=0) as part:
        communicator = part.worker.communicator
        wait_until(lambda: bool(communicator._others), "the client of the thread that sends")
        communicator._others[0]._connections[0].num_retries = 3

        def train() -> None:
            step(part)
            communicator._own.client._connections[0].num_retries = 2
            communicator.leave_thread()

        thread = threading.Thread(target=train)
        thread.start()
        thread.join(jobs.SECONDS)
        assert communicator.stats()["retries"] == 5
        assert len(communicator._others) == 1


# One worker: as torch


@each_of("rule", RULES)
@each_of("num_servers", [1, 3])
def test_half_async_with_one_worker_equals_torch(rule: str, num_servers: int) -> None:
    done = jobs.run(train, Net, fleet_optimizer(rule, **RULES[rule]), mode="half_async", num_servers=num_servers)
    assert_equal_values(done.values(**TABLES), plain(rule, 1), TOLERANCE)


def test_half_async_with_prefetch_equals_torch() -> None:
    """Rows are not pulled before the push of the step before has been applied."""

    def body(part: Part) -> None:
        for batch in part.prefetch(jobs.worker_batches(0, STEPS)):
            part.step(batch)

    done = jobs.run(body, Net, fleet_optimizer("sgd", **RULES["sgd"]), mode="half_async", num_servers=2)
    assert_equal_values(done.values(**TABLES), plain("sgd", 1), TOLERANCE)
    assert done.servers.staleness("items") == {0: STEPS}


@each_of("rule", RULES)
@each_of("num_servers", [1, 3])
def test_async_with_a_flush_after_each_step_equals_torch(rule: str, num_servers: int) -> None:
    def body(part: Part) -> None:
        for batch in jobs.worker_batches(0, STEPS):
            part.step(batch)
            part.flush()

    done = jobs.run(body, Net, fleet_optimizer(rule, **RULES[rule]), mode="async", num_servers=num_servers)
    assert_equal_values(done.values(**TABLES), plain(rule, 1), TOLERANCE)
    assert done.servers.staleness("items") == {0: STEPS}


class Tower(torch.nn.Module):
    """items · hidden: rows that are one update old make another result."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(jobs.NUM_ITEMS, 3, sparse=True)
        self.out = torch.nn.Linear(6, 1)

    def forward(self, batch: jobs.Batch) -> torch.Tensor:
        return self.out(self.items(batch["items"]).flatten(1)).squeeze(1)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_async_with_prefetch_equals_training_on_rows_one_update_old(num_servers: int) -> None:
    """With a flush after every step. The rows of batch i are pulled before step i - 1, so they have seen the updates
    0 to i - 2; those of the first two batches could not be foreseen, were pulled in time and are fresh. Dense
    parameters are fresh throughout (the flush brings them)."""
    rate, batches = 0.3, jobs.worker_batches(0, STEPS)

    def body(part: Part) -> None:
        for batch in part.prefetch(batches):
            part.step(batch)
            part.flush()

    done = jobs.run(body, Tower, fleet_optimizer("sgd", lr=rate), mode="async", num_servers=num_servers)
    torch.manual_seed(0)
    model = Tower()
    rows = [model.items.weight.detach().clone()]  # after 0, 1, 2, ... updates
    for i, batch in enumerate(batches):
        read = rows[i - 1] if i >= 2 else rows[i]
        seen = read[batch["items"]].requires_grad_()
        loss = torch.nn.functional.mse_loss(model.out(seen.flatten(1)).squeeze(1), batch["y"])
        grads = torch.autograd.grad(loss, [seen, *model.out.parameters()])
        updated = rows[i].clone()
        updated.index_add_(0, batch["items"].flatten(), grads[0].reshape(-1, 3), alpha=-rate)
        rows.append(updated)
        with torch.no_grad():
            for parameter, grad in zip(model.out.parameters(), grads[1:], strict=True):
                parameter.sub_(rate * grad)
    expected = {**jobs.values_of(model), "items": rows[-1]}
    assert_equal_values(done.values(items=jobs.NUM_ITEMS), expected, TOLERANCE)
    for server in range(num_servers):
        assert done.servers.staleness("items", server) == {0: 2, 1: STEPS - 2}


# Several workers: close to local training

NEAR = 0.01
"""Of the loss and of the AUC on held-out rows. Local training on the same batches, one after the other, reaches a loss
of about 0.50 and an AUC of about 0.84 (untrained: 0.69 and 0.5). The workers step in turns, so that every run ends with
the same numbers."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["half_async", "async"])
@pytest.mark.parametrize("seed", first_of([1, 2, 3]))
def test_several_workers_learn_what_one_process_learns(mode: str, seed: int) -> None:
    batches, turns = jobs.click_batches(seed, 120), jobs.Turns(WORKERS)

    def body(part: Part) -> tuple[float, float]:
        own = batches[part.index :: WORKERS]
        for batch in own:
            with turns.of(part):
                jobs.click_step(part.model, [part.optimizer], batch)
        part.barrier()
        part.flush()  # the others' last updates of the dense parameters
        return jobs.click_scores(part.model)

    done = jobs.run(body, jobs.Clicks, fleet_optimizer("adam", lr=0.02), mode=mode, num_workers=WORKERS, num_servers=2)
    torch.manual_seed(0)
    model = jobs.Clicks()
    optimizers = jobs.plain_optimizers("adam", model, lr=0.02)
    for batch in batches:
        jobs.click_step(model, optimizers, batch)
    loss, auc = jobs.click_scores(model)
    assert auc > 0.8
    assert done.results[0][0] == pytest.approx(loss, abs=NEAR)
    assert done.results[0][1] == pytest.approx(auc, abs=NEAR)
    pushes = sum(done.servers.staleness("wide").values())
    assert pushes == len(batches)


@pytest.mark.parametrize("mode", ["half_async", "async"])
def test_no_worker_waits_for_another(mode: str) -> None:
    """Worker 0 makes all its steps while worker 1 has not begun."""
    began = threading.Event()

    def body(part: Part) -> None:
        if part.index == 1:
            assert began.wait(jobs.SECONDS)
        for _ in range(5):
            step(part, torch.tensor([1, 2]))
        part.flush()
        began.set()

    done = jobs.run(body, Linear, jobs.sgd, mode=mode, num_workers=2, num_servers=2)
    assert torch.equal(done.rows("rows", 3)[1:], torch.full((2, 2), -0.5 * 10))


# How old the rows were


def test_half_async_with_one_worker_pushes_gradients_of_fresh_rows() -> None:
    servers = Servers(2)
    with one_worker(Linear(), mode="half_async", servers=servers) as part:
        for i in range(7):
            step(part, torch.tensor([1, i]))
    for server in range(2):
        assert servers.staleness("rows", server) == {0: 7}


@pytest.mark.parametrize(("prefetch", "threads"), [(False, 1), (True, 1), (False, 3)])
def test_the_age_of_rows_in_async_is_bounded_by_the_queue_and_what_is_in_flight(prefetch: bool, threads: int) -> None:
    """Rows of step i are pulled when at most send_queue_size steps wait in the queue and each sending thread has at
    most max_merge_var_num in its hands; with prefetch also step i - 1 is still to come. Only those can be applied
    between the pull and the push of step i.

    With several threads nothing bounds the later steps that overtake it: one thread may get no turn, with a step in its
    hands, while the others send all that come."""
    size, merge = 3, 2
    servers = Servers()
    batches = [torch.tensor([i % 5, 7]) for i in range(40)]
    configs = {"send_queue_size": size, "max_merge_var_num": merge, "thread_pool_size": threads}
    with one_worker(Linear(), mode="async", servers=servers, **configs) as part:
        for ids in part.prefetch(batches) if prefetch else batches:
            step(part, ids)
        part.flush()
        counts = servers.staleness("rows")
        assert sum(counts.values()) == sent(part)
        assert sent(part) + part.stats()["merged"] == len(batches)
        if threads == 1:
            assert max(counts) <= size + merge + prefetch


def test_a_held_up_sender_makes_rows_as_old_as_the_queue_allows() -> None:
    """The bound above is met exactly: nothing is applied until queue and sender are full."""
    servers, ids = Servers(), torch.tensor([1])
    with one_worker(Linear(), mode="async", servers=servers, send_queue_size=2, max_staleness=0) as part:
        servers.hold_pushes()
        step(part, ids)
        wait_until(lambda: part.worker.communicator.stats()["queue"] == 0, "the sender has taken the first step")
        pulls = servers.counts("PULL")[0]
        thread = threading.Thread(target=lambda: [step(part, ids) for _ in range(3)], daemon=True)
        thread.start()
        # The dense values are pulled after a step, so that two such pulls are among them.
        wait_until(lambda: servers.counts("PULL")[0] == pulls + 5, "all rows are pulled, the last step waits")
        servers.release_pushes()
        thread.join(jobs.SECONDS)
        part.flush()
    assert servers.staleness("rows") == {0: 1, 1: 1, 2: 1, 3: 1}


# a_sync_configs


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_merged_gradients_are_summed_and_counted(rule: str) -> None:
    """The sender waits for more (send_wait_times) until it has max_merge_var_num: 8 steps make 2 updates."""
    servers = Servers(2)
    configs = {"max_merge_var_num": 4, "send_wait_times": 20_000}
    optimizer = fleet_optimizer(rule, lr=0.5)
    with one_worker(Linear(), optimizer, mode="async", servers=servers, **configs) as part:
        for i in range(8):
            step(part, torch.tensor([1, 1, 2 + i % 2]))
        part.flush()
        stats = part.stats()
        assert (stats["steps"], stats["pushes"], stats["merged"]) == (8, 2, 6)
        assert servers.counts("PUSH") == [2, 2]
        rows, dense = part.rows("rows", [1, 2, 3]), part.model.w.detach()
        if rule == "sgd":
            assert torch.equal(rows, torch.tensor([[16.0], [4.0], [4.0]]).expand(3, 2) * -0.5)
            assert torch.equal(dense, torch.full((4,), -0.5 * 8))
        else:  # two updates with equal gradients move every number by the rate, twice
            torch.testing.assert_close(rows, torch.full((3, 2), -1.0), rtol=0, atol=1e-6)
            torch.testing.assert_close(dense, torch.full((4,), -1.0), rtol=0, atol=1e-6)


def test_without_merging_every_step_is_an_update() -> None:
    servers = Servers()
    with one_worker(Linear(), mode="async", servers=servers, max_staleness=0) as part:
        for _ in range(9):
            step(part, torch.tensor([1]))
        part.flush()
        assert (part.stats()["pushes"], part.stats()["merged"]) == (9, 0)
        assert servers.table("rows").step == 9


def test_the_sender_waits_for_more_only_as_often_as_it_is_told() -> None:
    with one_worker(Linear(), mode="async", max_merge_var_num=4, send_wait_times=0) as part:
        for i in range(3):
            step(part, torch.tensor([1]))
            wait_until(lambda expected=i + 1: sent(part) == expected, "a single step is sent without company")
        assert part.stats()["merged"] == 0


@pytest.mark.parametrize("size", [1, 3])
def test_a_full_queue_makes_training_wait(size: int) -> None:
    servers = Servers()
    queued: list[int] = []
    with one_worker(Linear(), mode="async", servers=servers, send_queue_size=size) as part:
        servers.hold_pushes()
        done: list[int] = []

        def loop() -> None:
            for i in range(12):
                step(part, torch.tensor([1]))
                done.append(i)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        wait_until(lambda: len(done) == size + 1, "queue and sender are full")  # one is in the sender's hands
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            queued.append(part.worker.communicator.stats()["queue"])
            time.sleep(0.01)
        assert len(done) == size + 1, "step() must wait while the queue is full"
        assert thread.is_alive()
        servers.release_pushes()
        while thread.is_alive():
            queued.append(part.worker.communicator.stats()["queue"])
            time.sleep(0.001)
        part.flush()
        assert max(queued) == size
        assert torch.equal(part.rows("rows", [1]), torch.full((1, 2), -0.5 * 12))


def test_dense_parameters_are_refreshed_after_so_many_sends() -> None:
    """After step 3, 6, ... values are asked for, which have seen the steps before it, and perhaps that one."""
    servers = Servers()
    with one_worker(Linear(), mode="async", servers=servers, min_send_grad_num_before_recv=3) as part:
        seen, before = [], servers.counts("PULL")[0]
        for i in range(8):
            part.model().backward()
            seen.append(int(part.model.w[0].item() / -0.5))
            part.optimizer.step()
            part.optimizer.zero_grad()
            wait_until(lambda expected=i + 1: sent(part) == expected and not pending(part), "the step is applied")
        assert seen[:3] == [0, 0, 0]
        assert seen[3] in (2, 3)
        assert seen[6] in (5, 6)
        assert len(set(seen[3:6])) == len(set(seen[6:])) == 1
        assert servers.counts("PULL")[0] == before + 2


def pending(part: Part) -> int:
    return int(part.worker.communicator._queue.unfinished_tasks)  # type: ignore[attr-defined]


@pytest.mark.parametrize("independent", [False, True])
def test_dense_parameters_that_others_changed_come_in_beside_training(independent: bool) -> None:
    with one_worker(Linear(), mode="async", independent_recv_thread=independent) as part:
        other = part.worker._connect()
        other.push_dense("dense.0", torch.full((4,), 100.0).numpy()).result()
        other.close()
        part.optimizer.param_groups[0]["lr"] = 0.0  # own steps change nothing

        def refreshed() -> bool:
            step(part)
            return bool((part.model.w == -50.0).all())

        wait_until(refreshed, "the other worker's update has come in, without a flush")


def test_values_that_the_independent_thread_pulled_before_a_flush_do_not_replace_those_of_the_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread is held up twice with what it has pulled: before the flush, and in its next look, after all checks."""
    pulled, go_on = threading.Semaphore(0), threading.Semaphore(0)
    with one_worker(Linear(), mode="async", independent_recv_thread=True, min_send_grad_num_before_recv=1) as part:
        communicator: Any = part.worker.communicator
        pull_dense, trains = communicator._pull_dense, threading.current_thread()

        def held_up(client: Any) -> Any:
            values = pull_dense(client)
            if threading.current_thread() is not trains:
                pulled.release()
                assert go_on.acquire(timeout=jobs.SECONDS)
            return values

        monkeypatch.setattr(communicator, "_pull_dense", held_up)
        step(part)
        assert pulled.acquire(timeout=jobs.SECONDS)
        other = part.worker._connect()
        other.push_dense("dense.0", torch.full((4,), 100.0).numpy()).result()
        other.close()
        part.flush()
        newest = part.model.w.detach().clone()
        communicator._receive_now.set()
        go_on.release()
        assert pulled.acquire(timeout=jobs.SECONDS)
        part.model()
        assert torch.equal(part.model.w, newest)
        go_on.release(3)  # with those of the end


def test_the_independent_thread_asks_only_after_so_many_sends() -> None:
    servers = Servers()
    configs = {"independent_recv_thread": True, "min_send_grad_num_before_recv": 4}
    with one_worker(Linear(), mode="async", servers=servers, **configs) as part:
        before = servers.counts("PULL")[0]
        for i in range(3):
            step(part)
            wait_until(lambda expected=i + 1: sent(part) == expected and not pending(part), "the step is applied")
        time.sleep(0.15)  # more than the thread's look
        assert servers.counts("PULL")[0] == before
        step(part)
        wait_until(lambda: servers.counts("PULL")[0] == before + 1, "the fourth send is followed by a look")


@pytest.mark.parametrize("threads", [2, 4])
def test_several_sending_threads_send_every_step_once(threads: int) -> None:
    servers = Servers(2)
    with one_worker(Linear(), mode="async", servers=servers, thread_pool_size=threads) as part:
        for i in range(40):
            step(part, torch.tensor([i % 4, 9]))
        part.flush()
        assert torch.equal(part.rows("rows", [0, 1, 2, 3, 9])[:, 0], torch.tensor([10.0, 10, 10, 10, 40]) * -0.5)
        assert torch.equal(part.model.w, torch.full((4,), -20.0))
        assert part.stats()["pushes"] == 40
        assert servers.counts("PUSH") == [40, 40]


class RowsOnly(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(6, 2, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)


class RowsAndDense(RowsOnly):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(2, 1)


@each_of("make", [RowsAndDense, RowsOnly])
@each_of("mode", ["sync", "async", "geo"])
def test_without_launch_barrier_all_workers_get_the_values_of_worker_0(make: type[torch.nn.Module], mode: str) -> None:
    """Worker 0 comes last. No worker waits for all others, but each waits for its values."""

    def body(part: Part) -> dict[str, torch.Tensor]:
        rows = part.model(torch.arange(6)).detach()
        dense = {name: p.detach().clone() for name, p in part.model.named_parameters() if len(p)}
        part.optimizer.zero_grad()
        return {**dense, "rows": rows}

    done = jobs.run(
        body, make, jobs.sgd, mode=mode, num_workers=3, num_servers=2, delays=[0.4, 0, 0.1], launch_barrier=False
    )
    torch.manual_seed(0)
    expected = jobs.values_of(make())
    for found in done.results:
        assert_equal_values(found, expected)


def test_without_launch_barrier_a_worker_begins_before_the_last_one_is_there() -> None:
    began = threading.Event()

    def body(part: Part) -> None:
        step(part, torch.tensor([1]))
        began.set()

    servers = Servers(1, 2)
    parts = [
        jobs.make_part(Linear, jobs.sgd, jobs.strategy("async", launch_barrier=False), info)
        for info in jobs.roles(2, 1)
    ]
    servers.make_tables(parts[0].job)

    def work(index: int) -> None:
        if index == 1:
            assert began.wait(jobs.SECONDS), "worker 0 waited for worker 1"
        part = parts[index]
        part.worker = jobs.Worker(part.job, servers)
        body(part)
        part.worker.stop()

    jobs.in_threads(work, 2)


def test_without_launch_barrier_the_wait_for_worker_0_has_an_end() -> None:
    info = replace(jobs.roles(2, 1)[1], start_timeout=0.5)
    part = jobs.make_part(Linear, jobs.sgd, jobs.strategy("async", launch_barrier=False), info)
    servers, ended = Servers(1, 2), threading.Event()
    servers.make_tables(part.job)

    def begin() -> None:
        with contextlib.suppress(FleetError):
            jobs.Worker(part.job, servers)
        ended.set()

    threading.Thread(target=begin, daemon=True).start()
    try:
        assert ended.wait(jobs.SECONDS), "worker 1 waits for ever for a worker 0 that never comes"
    finally:
        servers.table("dense.0").is_set = True  # lets it go


# Errors reach the training thread


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(jobs.MODES))
def test_a_dead_server_is_named_in_the_training_thread(mode: str) -> None:
    servers = jobs.SocketServers(Linear, jobs.sgd, 2, 1)
    servers.start()
    part = jobs.make_part(Linear, jobs.sgd, jobs.strategy(mode, rpc_timeout=8.0), servers.info(0, 1))
    part.worker = jobs.WorkerRole(part.job)
    step(part)
    part.flush()
    servers.close()
    started = time.monotonic()
    name = "|".join(f"tcp://{endpoint}" for endpoint in servers.endpoints)

    def train_on() -> None:
        while time.monotonic() < started + jobs.SECONDS:
            step(part)  # without a lookup: in async and geo only threads beside training talk to servers
            time.sleep(0.01)

    if mode == "sync":  # this wait may be long (sync_timeout), but not for a server that is silent
        with pytest.raises(ServerUnreachable, match=name):
            step(part)
    else:
        with pytest.raises(ServerUnreachable, match=name):
            train_on()
    assert time.monotonic() < started + jobs.SECONDS
    if mode in ("async", "geo"):  # in the other modes nothing is under way
        with pytest.raises(FleetError):
            part.flush()
    with pytest.raises(FleetError):  # and the end of the job does not hang
        part.worker.stop()
    part.worker.client.close()
    if mode == "hybrid":  # a worker that has failed keeps its group
        dist.destroy_process_group()


@each_of("mode", list(jobs.MODES))
@each_of("where", ["dense", "rows"])
def test_a_gradient_that_is_not_a_number_is_an_error_that_names_where_it_is(mode: str, where: str) -> None:
    class Broken(Linear):
        def forward(self, ids: torch.Tensor | None = None) -> torch.Tensor:
            part = self.w.sum() if where == "dense" else self.rows(ids).sum()
            return super().forward(ids) + part * float("nan")

    model, servers = Broken(), Servers()
    part = jobs.make_part(lambda: model, jobs.sgd, jobs.strategy(mode), jobs.roles(1, 1)[0])
    servers.make_tables(part.job)
    part.worker = jobs.Worker(part.job, servers)

    def train_on() -> None:
        end = time.monotonic() + jobs.SECONDS
        while time.monotonic() < end:
            step(part, torch.tensor([1]))
            time.sleep(0.005)

    found = ["'w'"] if where == "dense" else ["'rows'", "id 1"]
    with pytest.raises(TableError, match=naming("step 1", "NaN", *found)):
        train_on()
    assert not torch.isnan(torch.from_numpy(servers.table("dense.0").get(0, 4))).any()
    if mode == "hybrid":
        dist.destroy_process_group()


def test_the_worker_counts_steps_and_waits() -> None:
    with one_worker(Linear(), mode="async") as part:
        for _ in range(3):
            step(part, torch.tensor([1]))
        part.flush()
        stats: dict[str, Any] = part.stats()
    assert stats["steps"] == 3
    assert stats["queue"] == 0
    assert stats["retries"] == 0
    assert stats["pull_wait_ms"] > 0
    assert stats["push_wait_ms"] >= 0
