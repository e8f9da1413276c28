"""The age of the network: fresh in async, bounded by max_staleness, and gathered updates as in sync."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import TABLES, Net, Part, Servers, assert_equal_values, fleet_optimizer, one_worker, wait_until
from support.messages import naming
from test_asynchronous import Tower
from test_communicator import RULES, STEPS, TOLERANCE, plain, train

import torchfleet as fleet
from torchfleet.api.training import Report
from torchfleet.api.training import train as train_on
from torchfleet.base.errors import FleetError, StrategyError


def test_the_network_of_a_step_has_seen_everything_up_to_the_end_of_the_step_before() -> None:
    """Pushes are held until the network has been asked for: it has seen all updates but that of the step before. Rows
    are not pulled ahead here, so they are fresh. In plain torch: a network one update late."""
    rate, batches, servers = 0.2, jobs.worker_batches(0, STEPS), Servers(2)
    optimizer = fleet_optimizer("sgd", lr=rate)
    with one_worker(make_tower(), optimizer, mode="async", servers=servers, max_staleness=0) as part:
        for i, batch in enumerate(batches):
            servers.hold_pushes()
            part.step(batch)
            servers.release_pushes()
            wait_until(lambda done=i + 1: servers.table("dense.0").step == done, "the step is applied")
            wait_until(lambda done=i + 1: servers.table("dense.0", 1).step == done, "the step is applied")
        assert servers.staleness("dense.0") == {1: STEPS - 1}  # of the first step nothing is known
        part.flush()
        found = {name: value.detach().clone() for name, value in part.model.out.named_parameters()}
    model = make_tower()
    past = [{name: value.detach().clone() for name, value in model.out.named_parameters()}]
    for i, batch in enumerate(batches):
        model.out.load_state_dict(past[max(0, i - 1)])
        model.zero_grad()
        jobs.loss_of(model, batch).backward()
        past.append({name: past[-1][name] - rate * value.grad for name, value in model.out.named_parameters()})
        with torch.no_grad():
            model.items.weight -= rate * model.items.weight.grad.to_dense()
    assert_equal_values(found, past[-1], TOLERANCE)


def make_tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


@pytest.mark.parametrize("num_servers", [1, 2])
def test_one_worker_with_max_staleness_equals_torch(num_servers: int) -> None:
    """It sees its own updates, and pulls no rows ahead without prefetch."""
    optimizer = fleet_optimizer("adam", **RULES["adam"])
    done = jobs.run(train, Net, optimizer, mode="async", num_servers=num_servers, max_staleness=1)
    assert_equal_values(done.values(**TABLES), plain("adam", 1), TOLERANCE)
    assert done.servers.staleness("dense.0") == {0: STEPS}


@pytest.mark.parametrize(("configs", "bound"), [({"max_staleness": 4}, 4), ({}, 3)], ids=["set", "default"])
def test_no_network_is_older_than_max_staleness_however_slow_a_worker_is(configs: dict[str, int], bound: int) -> None:
    """Worker 2 goes on when the others are held, or have made all their steps. Barriers and uneven numbers of steps
    lead to no wait without end."""
    num_steps, servers = (12, 9, 3), Servers(2, 3)
    ended: set[tuple[int, int]] = set()

    def others_stand_still(epoch: int) -> bool:
        bounds = [server.state.pushes.bound for server in servers.servers]  # one server holding a push is enough
        held = {request.message.worker for bound in bounds for request in bound.waiting()}
        return held | {worker for worker, of in ended if of == epoch} >= {0, 1}

    def body(part: Part) -> None:
        for epoch in range(2):
            for batch in part.prefetch(jobs.worker_batches(10 * epoch + part.index, num_steps[part.index])):
                loss = jobs.loss_of(part.model, batch)
                if part.index == 2:
                    wait_until(lambda epoch=epoch: others_stand_still(epoch), "the others are held, or at their end")
                loss.backward()
                part.optimizer.step()
                part.optimizer.zero_grad()
            ended.add((part.index, epoch))
            part.barrier()
        part.flush()

    optimizer = fleet_optimizer("sgd", lr=0.01)
    done = jobs.run(body, Net, optimizer, mode="async", num_workers=3, servers=servers, **configs)
    for server in range(2):
        ages = done.servers.staleness("dense.0", server)
        assert sum(ages.values()) == 2 * sum(num_steps)
        assert max(ages) <= bound
        assert done.servers.servers[server].state.pushes.num_dropped == 0
        assert done.servers.table("items", server).step == 2 * sum(num_steps)


@each_of(
    ("configs", "bound"),
    [({}, 4), ({"max_staleness": 0}, 0), ({"max_staleness": 9}, 9), ({"gather": 2}, 0), ({"send_queue_size": 4}, 0)],
    ids=str,
)
def test_the_bound_is_the_number_of_workers_unless_another_setting_forbids_it(
    configs: dict[str, int], bound: int
) -> None:
    assert jobs.strategy("async", **configs).a_sync_configs.bound(4) == bound


def test_no_worker_waits_for_one_that_predicts() -> None:
    """Worker 1 predicts until worker 0 has made all its steps."""
    is_done = threading.Event()

    def body(part: Part) -> None:
        batches = jobs.worker_batches(part.index, 8)
        part.step(batches[0])
        if part.index == 0:
            for batch in batches:
                part.step(batch)
            is_done.set()
        else:
            with torch.no_grad():
                jobs.loss_of(part.model, batches[0])
            assert is_done.wait(jobs.SECONDS / 2)
            part.step(batches[1])
        part.flush()

    jobs.run(body, Net, fleet_optimizer("sgd", lr=0.01), mode="async", num_workers=2, num_servers=1)


def test_fewer_than_the_number_of_workers_cannot_be_kept() -> None:
    with pytest.raises(StrategyError, match=naming(2)):
        jobs.run(train, Net, jobs.sgd, mode="async", num_workers=3, max_staleness=1)


def test_several_threads_of_a_worker_are_refused() -> None:
    with one_worker(make_tower(), mode="async", max_staleness=2) as part:
        report = Report("train", None, 0, None)
        data = fleet.InMemoryDataset()
        with pytest.raises(FleetError, match=naming("thread=2", "max_staleness")):
            train_on(lambda batch: {}, data, [part.optimizer], part.worker.engine, 2, report)


# Gathered updates


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "half_async"])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_gathering_one_push_of_each_worker_is_sync_training_to_the_bit(mode: str, rule: str) -> None:
    num_workers = 3
    meeting = threading.Barrier(num_workers, timeout=jobs.SECONDS)

    def body(part: Part) -> list[float]:
        losses = []
        for batch in jobs.worker_batches(part.index, STEPS, size=4 + 2 * part.index):
            losses.append(part.step(batch))
            if mode == "async":  # every push is kept before anybody asks for what is gathered
                wait_until(lambda: not part.worker.communicator._open, "the push is kept")
            meeting.wait()
            part.flush()
            meeting.wait()
        return losses

    def sync(part: Part) -> list[float]:
        batches = jobs.worker_batches(part.index, STEPS, size=4 + 2 * part.index)
        return [part.step(batch) for batch in batches]

    optimizer = fleet_optimizer(rule, **RULES[rule])
    expected = jobs.run(sync, Net, optimizer, num_workers=num_workers, num_servers=2)
    done = jobs.run(body, Net, optimizer, mode=mode, num_workers=num_workers, num_servers=2, gather=num_workers)
    assert_equal_values(done.values(**TABLES), expected.values(**TABLES))
    assert done.results == expected.results
    assert set(done.servers.staleness("dense.0")) == {0}


@pytest.mark.parametrize("mode", ["async", "half_async"])
def test_everything_gathered_has_reached_the_tables_when_a_worker_stops(mode: str) -> None:
    """Seven steps, three of which make an update."""
    servers = Servers(2)

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w * x).sum()

    with one_worker(Sum(), mode=mode, servers=servers, gather=3) as part:
        for i in range(7):
            part.model(torch.full((4,), float(i + 1))).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
    expected = -0.5 * ((1 + 2 + 3) / 3 + (4 + 5 + 6) / 3 + 7)
    for server in range(2):
        assert servers.table("dense.0", server).step == 3
        assert servers.table("dense.0", server).get(0, 2).tolist() == pytest.approx([expected] * 2)


@each_of(
    ("fields", "text"),
    [
        ({"a_sync": False, "a_sync_configs": {"gather": 4}}, "'gather' sync"),
        ({"a_sync_configs": {"gather": 4, "k_steps": 5}}, "'gather' geo"),
        ({"a_sync_configs": {"gather_max_age": 2, "k_steps": 5}}, "'gather_max_age' geo"),
        ({"a_sync_configs": {"max_staleness": 4, "half_async": True}}, "'max_staleness' half_async"),
        ({"a_sync_configs": {"max_staleness": 4, "gather": 2}}, "gather=2 max_staleness=4"),
        ({"a_sync_configs": {"max_staleness": 4, "send_queue_size": 4}}, "max_staleness 'send_queue_size'=4"),
        ({"a_sync_configs": {"max_merge_var_num": 4, "gather": 2}}, "gather=2 max_merge_var_num=4"),
        ({"sync_mean": "workers"}, "sync_mean='workers' gather"),
    ],
)
def test_settings_that_contradict_each_other_are_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(FleetError, match=naming(*text.split())):
        jobs.DistributedStrategy(**{"a_sync": True, **fields}).freeze("a test")
