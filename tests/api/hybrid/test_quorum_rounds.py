"""Hybrid mode with a quorum: networks equal those of one process that takes the same gradients in the same rounds."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import jobs
from support.jobs import Batch, Net, Part

from torchfleet.base.errors import StrategyError
from torchfleet.base.role.role_info import GO_ON
from torchfleet.ps.server.server import Server

Values = dict[str, torch.Tensor]
NUM_WORKERS = 3
SIZES = (8, 3, 5)
HELD = 1  # the step in which a worker is held back


@dataclass
class Step:
    """One step of a worker: its gradients are named by the worker and `base`."""

    base: int
    batch: Batch
    parts: list[tuple[int, int]]  # in the round that the worker stepped by
    is_missed: bool
    values: Values


@dataclass
class Holding:
    """Worker 2 gives every gradient when the others have made the round that it is for, and that of step HELD when they
    have made `lag` rounds. The others begin no further round before it has: who is late, and by how much, is fixed."""

    lag: int
    is_missed: bool = False  # worker 2 enters again after step HELD
    num_given: int = 0  # steps of worker 2

    def before_backward(self, part: Part, step: int) -> None:
        meetings = part.worker._servers.servers[0].state.meetings  # type: ignore[attr-defined]
        if part.index == 2:
            following = rounds_of(part).number + (self.lag if step == HELD else 1)
            jobs.wait_until(lambda: meetings.quorum.number >= following, "rounds of the others")
            return
        jobs.wait_until(lambda: self.num_given > self._last_before(step), "gradients of worker 2")
        if self.is_missed and step == HELD + self.lag:
            jobs.wait_until(lambda: 2 in meetings.entrance.waiting, "worker 2 at the entrance")

    def after_backward(self, part: Part) -> None:
        self.num_given += part.index == 2

    def _last_before(self, step: int) -> int:
        """The step of worker 2 that comes before this step of the others."""
        if step < HELD + self.lag:
            return min(step, HELD) - 1
        return max(HELD, step - self.lag - self.is_missed)


def rounds_of(part: Part) -> Any:
    return part.worker._hybrid.rounds  # type: ignore[union-attr]


def network(model: torch.nn.Module) -> Values:
    dense = {id(p) for p in jobs.split_parameters(model)[0]}
    return {name: value.detach().clone() for name, value in model.named_parameters() if id(value) in dense}


def still_rows(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Rows do not move, so that the networks are those of one process, in whatever order rows are pushed."""
    dense, sparse = jobs.split_parameters(model)
    return torch.optim.Adam([{"params": dense, "lr": 0.01}, {"params": sparse, "lr": 0.0, "row_rule": "sgd"}])


def body_with(holding: Holding, lengths: tuple[int, ...]) -> Any:
    def body(part: Part) -> tuple[list[Step], dict[str, Any], dict[str, Any]]:
        made = []
        batches = jobs.worker_batches(part.index, lengths[part.index], SIZES[part.index])
        for number, batch in enumerate(part.prefetch(batches)):
            loss = jobs.loss_of(part.model, batch)
            holding.before_backward(part, number)
            loss.backward()
            holding.after_backward(part)
            part.optimizer.step()
            part.optimizer.zero_grad()
            rounds = rounds_of(part)
            made.append(Step(rounds.number - 1, batch, list(rounds.parts), rounds.is_missed, network(part.model)))
        part.barrier()
        stats = part.worker.stats()
        return made, stats["worker"]["exchange"], stats["servers"][0]["quorum"]

    return body


def assert_as_in_one_process(workers: list[list[Step]]) -> dict[int, list[tuple[int, int]]]:
    """Replay the rounds: each part's gradient is that of the network before the round it was computed for. Returns
    which gradients were in which round."""
    batches = {(worker, step.base): step.batch for worker, steps in enumerate(workers) for step in steps}
    made = {step.base: step.parts for steps in workers for step in steps if not step.is_missed}
    torch.manual_seed(0)
    model, scratch = Net(), Net()
    scratch.load_state_dict(model.state_dict())
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam(jobs.split_parameters(model)[0], lr=0.01)
    before: dict[int, Values] = {}
    for number in sorted(made):
        before[number] = network(model)
        total = sum(len(batches[part]["y"]) for part in made[number])
        for part in made[number]:
            scratch.load_state_dict(before[part[1]], strict=False)
            scratch.zero_grad()
            (jobs.loss_of(scratch, batches[part]) * len(batches[part]["y"]) / total).backward()
            for name, value in scratch.named_parameters():
                if name in before[number] and value.grad is not None:
                    own = parameters[name]
                    own.grad = value.grad.clone() if own.grad is None else own.grad + value.grad
        optimizer.step()
        model.zero_grad()
        for step in (step for steps in workers for step in steps if step.base == number and not step.is_missed):
            jobs.assert_equal_values(step.values, network(model), 1e-5)
    return made


@pytest.mark.parametrize(
    ("lag", "max_age", "is_missed", "is_dropped"),
    [(1, 4, False, False), (2, 4, True, False), (3, 2, True, True), (1, 0, False, True)],
    ids=["late by one round", "by two", "too old", "every late one is too old"],
)
def test_networks_are_those_of_the_gradients_of_each_round(
    lag: int, max_age: int, is_missed: bool, is_dropped: bool
) -> None:
    lengths = (lag + 4, lag + 4, 4)
    holding = Holding(lag, is_missed)
    made = jobs.run(
        body_with(holding, lengths), Net, still_rows, num_workers=NUM_WORKERS, num_servers=2,
        mode="hybrid", exchange="servers", quorum=2, quorum_max_age=max_age,
    )  # fmt: skip
    workers = [steps for steps, _, _ in made.results]
    rounds = assert_as_in_one_process(workers)
    held = workers[2][HELD]
    assert held.is_missed == is_missed
    found = [number for number, parts in rounds.items() if (2, held.base) in parts]
    assert found == ([] if is_dropped else [held.base + lag])
    counted = made.results[0][2]
    given = sum(length * size for length, size in zip(lengths, SIZES, strict=True))
    assert sum(counted["samples"].values()) == given, "every sample is accounted for, once"
    in_rounds = sum(SIZES[worker] for parts in rounds.values() for worker, _ in parts)
    assert counted["samples"]["on_time"] + counted["samples"]["late"] == in_rounds
    assert sum(own["dropped"] for _, own, _ in made.results) == counted["gradients"]["dropped"] >= is_dropped


def test_a_worker_that_joins_is_counted_and_all_networks_are_those_of_one_process() -> None:
    """An elastic job: two workers begin, and the third one joins while they wait for it."""
    servers = jobs.Servers(2, NUM_WORKERS)
    for server in servers.servers:
        Server.__init__(server, jobs.MAX_TABLE_BYTES, NUM_WORKERS, min_workers=2, on_worker_loss=GO_ON)  # type: ignore[misc]
    roles = [replace(role, min_workers=2, on_worker_loss=GO_ON) for role in jobs.roles(NUM_WORKERS, 2)]
    settings = jobs.strategy("hybrid", exchange="servers", quorum=2)
    parts = [jobs.make_part(Net, still_rows, settings, role) for role in roles]
    servers.make_tables(parts[0].job)
    gate, entrance = threading.Event(), servers.servers[0].state.meetings.entrance

    class Joining(Holding):
        def before_backward(self, part: Part, step: int) -> None:
            if part.index < 2 and step == 2:
                gate.set()
                jobs.wait_until(lambda: 2 in entrance.waiting or 2 in entrance.members, "the worker at the entrance")

    def work(index: int) -> Any:
        assert index < 2 or gate.wait(jobs.SECONDS)
        parts[index].worker = jobs.Worker(parts[index].job, servers)
        result = body_with(Joining(0), (8, 8, 3))(parts[index])
        parts[index].worker.stop()
        return result

    results = jobs.in_threads(work, NUM_WORKERS)
    rounds = assert_as_in_one_process([steps for steps, _, _ in results])
    assert any(worker == 2 for made in rounds.values() for worker, _ in made)
    samples = results[0][2]["samples"]
    assert sum(samples.values()) == 8 * SIZES[0] + 8 * SIZES[1] + 3 * SIZES[2]


def test_a_quorum_of_more_workers_than_there_are_is_refused() -> None:
    with pytest.raises(StrategyError, match="quorum"):
        jobs.run(lambda part: None, Net, still_rows, mode="hybrid", num_workers=2, exchange="servers", quorum=3)


@pytest.mark.parametrize("configs", [{"quorum": 2, "balance": True}, {"quorum": -1}, {"quorum_max_age": -1}])
def test_settings_that_do_not_fit_are_refused(configs: dict[str, Any]) -> None:
    with pytest.raises(StrategyError):
        jobs.strategy("hybrid", exchange="servers", **configs)
