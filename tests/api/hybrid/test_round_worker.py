"""Hybrid mode with exchange='servers': several workers as threads, against one process of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import jobs
from support.jobs import Batch, Net, Part

from torchfleet.api.hybrid import server_average
from torchfleet.base.errors import WorkerMissing
from torchfleet.base.role.role_info import GO_ON
from torchfleet.ps.server.server import Server

SERVERS = {"mode": "hybrid", "exchange": "servers"}
NUM_WORKERS, STEPS = 3, 4
SIZES = (8, 3, 5)


def network(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    dense = {id(p) for p in jobs.split_parameters(model)[0]}
    return {name: value.detach().clone() for name, value in model.named_parameters() if id(value) in dense}


def still_rows(kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> jobs.MakeOptimizer:
    """Rows do not move, so that the networks are those of one process, in whatever order rows are pushed."""

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        dense, sparse = jobs.split_parameters(model)
        return kind([{"params": dense, "lr": 0.01}, {"params": sparse, "lr": 0.0, "row_rule": "sgd"}], **options)

    return make


def in_one_process(batches: list[list[Batch]], make: Callable[..., Any] = torch.optim.Adam) -> dict[str, torch.Tensor]:
    """The network of a process that trains on the batches of all workers as one."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make(jobs.split_parameters(model)[0], lr=0.01)
    for step in range(max(map(len, batches))):
        jobs.loss_of(model, jobs.combined([own[step] for own in batches if step < len(own)])).backward()
        optimizer.step()
        model.zero_grad()
    return network(model)


def batches_of(worker: int, num: int = STEPS) -> list[Batch]:
    return jobs.worker_batches(worker, num, SIZES[worker])


def train(part: Part) -> dict[str, torch.Tensor]:
    for batch in batches_of(part.index):
        part.step(batch)
    return network(part.model)


def assert_alike(found: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    """All workers to the bit, and one process to rounding."""
    for other in found[1:]:
        jobs.assert_equal_values(other, found[0])
    jobs.assert_equal_values(found[0], wanted, 1e-5)


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.Adam, {}), (torch.optim.NAdam, {})], ids=["adam", "an optimizer of torch alone"]
)
def test_networks_equal_one_process_with_all_samples(kind: Any, options: dict[str, Any]) -> None:
    """The workers' batches differ in size: the mean is by samples. A second run gives the same bits."""
    runs = []
    for _ in range(2):
        made = jobs.run(train, Net, still_rows(kind, **options), num_workers=NUM_WORKERS, num_servers=2, **SERVERS)
        runs.append(made.results)
    assert_alike(runs[0], in_one_process([batches_of(worker) for worker in range(NUM_WORKERS)], kind))
    jobs.assert_equal_values(runs[1][0], runs[0][0])


def test_clipping_acts_on_the_mean_and_stats_tell_of_the_exchange() -> None:
    def body(part: Part) -> tuple[list[float], dict[str, Any]]:
        norms = []
        for batch in batches_of(part.index):
            jobs.loss_of(part.model, batch).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(part.model.parameters(), 0.1)))
            part.optimizer.step()
            part.optimizer.zero_grad()
        return norms, part.stats()["exchange"]

    results = jobs.run(body, Net, still_rows(), num_workers=NUM_WORKERS, **SERVERS).results
    assert results[0][0] == results[1][0] == results[2][0]
    stats = results[0][1]
    assert stats["rounds"] == STEPS
    assert stats["workers"] == [0, 1, 2]
    num = sum(value.numel() for value in network(Net()).values())
    assert stats["bytes"] == 4 * num * STEPS


def test_gradient_merge_exchanges_the_sum_of_several_batches() -> None:
    def body(part: Part) -> tuple[dict[str, torch.Tensor], int]:
        values = train(part)
        return values, part.stats()["exchange"]["rounds"]

    servers = jobs.Servers(1, 2)
    strategy = jobs.DistributedStrategy(
        a_sync=True,
        a_sync_configs={"hybrid": True, "exchange": "servers"},
        gradient_merge=True,
        gradient_merge_configs={"k_steps": 2},
    )
    parts = [jobs.make_part(Net, still_rows(torch.optim.SGD), strategy, info) for info in jobs.roles(2, 1)]
    servers.make_tables(parts[0].job)

    def work(index: int) -> Any:
        parts[index].worker = jobs.Worker(parts[index].job, servers)
        result = body(parts[index])
        parts[index].worker.stop()
        return result

    results = jobs.in_threads(work, 2)
    assert [rounds for _, rounds in results] == [STEPS // 2, STEPS // 2]
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(jobs.split_parameters(model)[0], lr=0.01)
    own = [batches_of(worker) for worker in range(2)]
    for step in range(0, STEPS, 2):
        for at in (step, step + 1):  # each worker's mean of its batches, then by samples
            parts_of = [jobs.loss_of(model, own[w][at]) * SIZES[w] / (SIZES[0] + SIZES[1]) / 2 for w in range(2)]
            sum(parts_of).backward()
        optimizer.step()
        model.zero_grad()
    assert_alike([values for values, _ in results], network(model))


@pytest.mark.parametrize("lengths", [(4, 2, 3), (3, 0, 2), (0, 0, 2)], ids=str)
@pytest.mark.parametrize("sync_mean", ["samples", "workers"])
def test_a_worker_without_a_batch_gives_no_samples_and_all_loops_end_with_one_network(
    lengths: tuple[int, ...], sync_mean: str
) -> None:
    def body(part: Part) -> list[tuple[int, dict[str, torch.Tensor]]]:
        passes = []
        for _ in range(2):
            num = 0
            for batch in part.prefetch(batches_of(part.index, lengths[part.index])):
                part.step(batch)
                num += 1
            passes.append((num, network(part.model)))
        return passes

    config = {**SERVERS, "sync_mean": sync_mean}
    results = jobs.run(body, Net, still_rows(), num_workers=NUM_WORKERS, num_servers=2, **config).results
    assert [[num for num, _ in passes] for passes in results] == [[length] * 2 for length in lengths]
    for passed in range(2):
        values = [passes[passed][1] for passes in results]
        for other in values[1:]:
            jobs.assert_equal_values(other, values[0])
    own = [batches_of(worker, length) for worker, length in enumerate(lengths)]
    wanted = uneven_in_one_process(own, 2, sync_mean == "samples")
    jobs.assert_equal_values(results[0][-1][1], wanted, 1e-5)


def uneven_in_one_process(own: list[list[Batch]], num_passes: int, by_samples: bool) -> dict[str, torch.Tensor]:
    """The network of a process that trains, in every step, on the batches of those workers that have one."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(jobs.split_parameters(model)[0], lr=0.01)
    for step in num_passes * list(range(max(map(len, own)))):
        batches = [batches[step] for batches in own if step < len(batches)]
        if by_samples:
            jobs.loss_of(model, jobs.combined(batches)).backward()
        else:
            sum(jobs.loss_of(model, batch) / len(batches) for batch in batches).backward()
        optimizer.step()
        model.zero_grad()
    return network(model)


def test_a_worker_that_goes_to_a_barrier_meanwhile_is_named() -> None:
    def body(part: Part) -> None:
        for batch in batches_of(part.index, STEPS if part.index else STEPS - 1):
            part.step(batch)
        part.barrier()

    with pytest.raises(WorkerMissing, match="worker 0 waits in barrier 'workers'"):
        jobs.run(body, Net, still_rows(), num_workers=2, **SERVERS)


class ElasticServers(jobs.Servers):
    def __init__(self, num_servers: int, num_workers: int, min_workers: int = 0) -> None:
        super().__init__(num_servers, num_workers)
        for server in self.servers:
            Server.__init__(server, jobs.MAX_TABLE_BYTES, num_workers, min_workers=min_workers, on_worker_loss=GO_ON)  # type: ignore[misc]


def run_elastic(
    body: Callable[[Part], Any], make: jobs.MakeOptimizer, begin: Callable[[int], object], num_servers: int = 2
) -> list[Any]:
    """Two workers at first, and a third one. `begin`: called before a worker starts."""
    servers = ElasticServers(num_servers, NUM_WORKERS, 2)
    roles = [replace(role, min_workers=2, on_worker_loss=GO_ON) for role in jobs.roles(NUM_WORKERS, num_servers)]
    settings = jobs.strategy("hybrid", exchange="servers")
    parts = [jobs.make_part(Net, make, settings, role) for role in roles]
    servers.make_tables(parts[0].job)

    def work(index: int) -> Any:
        begin(index)
        parts[index].worker = jobs.Worker(parts[index].job, servers)
        result = body(parts[index])
        parts[index].worker.stop()
        return result

    return jobs.in_threads(work, NUM_WORKERS)


def wait_at_entrance(part: Part, worker: int) -> None:
    entrance = part.worker._servers.servers[0].state.meetings.entrance  # type: ignore[attr-defined]
    jobs.wait_until(lambda: worker in entrance.waiting or worker in entrance.members, "the worker at the entrance")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam], ids=["adam", "an optimizer of torch alone"])
def test_a_worker_that_joins_gets_network_and_state_and_counts_from_the_next_round(kind: Any) -> None:
    """After two rounds of workers 0 and 1 worker 2 joins: they wait at a gate until it stands at the entrance."""
    gate = threading.Event()

    def begin(index: int) -> None:
        if index == 2:
            assert gate.wait(jobs.SECONDS)

    def body(part: Part) -> list[dict[str, torch.Tensor]]:
        values = []
        for step, batch in enumerate(batches_of(part.index)):
            if part.index < 2 and step == 2:
                gate.set()
                wait_at_entrance(part, 2)
            part.step(batch)
            values.append(network(part.model))
        return values

    first, second, third = run_elastic(body, still_rows(kind), begin)
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(jobs.split_parameters(model)[0], lr=0.01)
    # Round 3 is that of workers 0 and 1; worker 2's first batch is in the fourth.
    own = [batches_of(worker) for worker in range(3)]
    for number, batches in enumerate([[own[0][s], own[1][s]] for s in range(3)] + [[own[0][3], own[1][3], own[2][0]]]):
        jobs.loss_of(model, jobs.combined(batches)).backward()
        optimizer.step()
        model.zero_grad()
        jobs.assert_equal_values(first[number], second[number])
        jobs.assert_equal_values(first[number], network(model), 1e-5)
    jobs.assert_equal_values(third[0], first[3])


def test_a_worker_whose_batches_end_leaves_and_the_others_go_on() -> None:
    lengths, both = (2, 4, 0), threading.Barrier(NUM_WORKERS)

    def body(part: Part) -> tuple[int, dict[str, torch.Tensor]]:
        num = 0
        for batch in part.prefetch(batches_of(part.index, lengths[part.index])):
            part.step(batch)
            num += 1
        values = network(part.model)
        both.wait(jobs.SECONDS)  # in a second loop, all have the network of worker 1 again
        for batch in part.prefetch(batches_of(part.index, 1)):
            part.step(batch)
        return num, values

    results = run_elastic(body, still_rows(), lambda index: None, num_servers=1)
    assert [num for num, _ in results] == list(lengths)
    wanted = in_one_process([batches_of(0, 2), batches_of(1, 4)])
    jobs.assert_equal_values(results[1][1], wanted, 1e-5)


def test_with_balance_a_slow_worker_gets_smaller_batches_and_networks_stay_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 1 takes five times as long for a sample, by clocks of their own."""
    own = threading.local()
    clock = SimpleNamespace(perf_counter=lambda: getattr(own, "now", 0.0))
    monkeypatch.setattr(server_average, "time", clock)

    def body(part: Part) -> tuple[list[int], dict[str, torch.Tensor]]:
        sizes = []
        for batch in part.prefetch(jobs.click_batches(part.index, 12, 20)):
            loss = jobs.click_loss(part.model, batch)
            own.now = clock.perf_counter() + (0.001 + 0.004 * part.index) * len(batch["y"])
            loss.backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            sizes.append(len(batch["y"]))
        return sizes, network(part.model)

    make = still_rows(torch.optim.SGD)
    results = jobs.run(body, jobs.Clicks, make, num_workers=2, **SERVERS, balance=True).results
    (fast, first), (slow, second) = results
    jobs.assert_equal_values(first, second)
    assert fast[0] == slow[0] == 20
    assert min(slow) < 15
    assert max(fast) > 25
