"""Sync training on batches of different sizes: one update equals one process on the combined batch of all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.cases import each_of
from support.fleets import Talk, assert_ok, keys_of, refusal, values_of
from support.jobs import TABLES, Net, Part, assert_equal_values, combined, fleet_optimizer, make_batch, plain_step
from support.messages import lines_naming, naming

from torchfleet.base.errors import StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.net.wire import SYNC, Array, Command
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Rule, TableSpec

TOLERANCE = 1e-6
STEPS = 6
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "adam": {"lr": 0.02, "eps": 1e-4},
}
Batches = Callable[[int, int], list[jobs.Batch]]  # of a worker and a step


def batches_of(worker: int, step: int) -> list[jobs.Batch]:
    """One batch per step: another size for every worker and step."""
    return [make_batch(1000 * worker + step, 1 + (5 * worker + 3 * step) % 11)]


def train(part: Part, of: Batches = batches_of) -> None:
    for step in range(STEPS):
        for batch in of(part.index, step):
            jobs.loss_of(part.model, batch).backward()
        part.optimizer.step()
        part.optimizer.zero_grad()


def plain(rule: str, num_workers: int, of: Batches = batches_of) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizers = jobs.plain_optimizers(rule, model, **RULES[rule])
    for step in range(STEPS):
        plain_step(model, optimizers, combined([b for worker in range(num_workers) for b in of(worker, step)]))
    return jobs.values_of(model)


@each_of("rule", RULES)
@each_of(("num_workers", "num_servers"), [(2, 1), (3, 2)])
def test_training_equals_one_process_on_the_combined_batches(rule: str, num_workers: int, num_servers: int) -> None:
    make = fleet_optimizer(rule, **RULES[rule])
    run = jobs.run(train, Net, make, num_workers=num_workers, num_servers=num_servers)
    assert_equal_values(run.values(**TABLES), plain(rule, num_workers), TOLERANCE)


class Tower(torch.nn.Module):
    """No lookups: its first tensor is not the batch, and it returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.out(x).squeeze(1) - y).square().mean()


def samples(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * worker + step)
    num = 1 + (7 * worker + 2 * step) % 9
    return torch.randn(num, 3, generator=generator), torch.randn(num, generator=generator)


def plain_tower(weights: Callable[[int, int], float]) -> torch.Tensor:
    """Two workers' mean losses, weighted, in one process of torch."""
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [samples(worker, step) for worker in range(2)]
        shares = np.array([weights(worker, len(parts[worker][0])) for worker in range(2)])
        for share, part in zip(shares / shares.sum(), parts, strict=True):
            (model(*part) * share).backward()
        optimizer.step()
    return model.out.weight.detach()


def tower_run(body: Callable[[Part], None], **options: Any) -> torch.Tensor:
    run = jobs.run(body, Tower, lambda m: jobs.sgd(m, 0.1), num_workers=2, **options)
    return run.parts[0].model.out.weight.detach()


def train_tower(part: Part) -> None:
    for step in range(STEPS):
        part.model(*samples(part.index, step)).backward()
        part.optimizer.step()
        part.optimizer.zero_grad()


def test_a_model_without_lookups_that_returns_its_loss_counts_its_samples() -> None:
    assert torch.allclose(tower_run(train_tower), plain_tower(lambda _, num: num), atol=TOLERANCE)


def test_workers_count_alike_if_the_strategy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = jobs.strategy

    def alike(*args: Any, **fields: Any) -> DistributedStrategy:
        return DistributedStrategy(**made(*args, **fields).differences(), sync_mean="workers")

    monkeypatch.setattr(jobs, "strategy", alike)
    assert torch.allclose(tower_run(train_tower), plain_tower(lambda *_: 1.0), atol=TOLERANCE)


def test_validation_and_batches_that_were_given_up_do_not_count() -> None:
    def body(part: Part) -> None:
        for step in range(STEPS):
            if part.index == 0:
                with torch.no_grad():
                    part.model(torch.randn(50, 3), torch.randn(50))
                part.model(torch.randn(40, 3), torch.randn(40))  # validation that forgot no_grad
                part.model(torch.randn(30, 3), torch.randn(30)).backward()
                part.optimizer.zero_grad()  # given up
            part.model(*samples(part.index, step)).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()

    assert torch.allclose(tower_run(body), plain_tower(lambda _, num: num), atol=TOLERANCE)


def test_a_worker_counts_for_all_batches_that_it_has_accumulated() -> None:
    """Worker 1 makes its step of two halves, each half of the loss; worker 0 of one batch."""

    def body(part: Part) -> None:
        for step in range(STEPS):
            x, y = samples(part.index, step)
            x, y = torch.cat([x, x]), torch.cat([y, y])
            num = 2 if part.index == 1 else 1
            for one, other in zip(x.chunk(num), y.chunk(num), strict=True):
                (part.model(one, other) / num).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()

    assert torch.allclose(tower_run(body), plain_tower(lambda _, num: num), atol=TOLERANCE)


def test_where_the_number_is_not_clear_workers_count_alike_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Ragged(Tower):
        def forward(self, x: torch.Tensor, y: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return super().forward(x, y)

    def body(part: Part) -> None:
        for step in range(STEPS):
            part.model(*samples(part.index, step), torch.zeros(100)).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()

    run = jobs.run(body, Ragged, lambda m: jobs.sgd(m, 0.1), num_workers=2)
    assert torch.allclose(run.parts[0].model.out.weight, plain_tower(lambda *_: 1.0), atol=TOLERANCE)
    error = capsys.readouterr().err
    assert len(lines_naming(error, "worker 0", "samples")) == 1
    assert "sync_mean='workers'" in error
    assert "100" in error


def test_a_worker_without_a_sample_changes_nothing() -> None:
    def body(part: Part) -> None:
        for step in range(STEPS):
            if part.index == 0:
                part.model(*samples(0, step)).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()

    assert torch.allclose(tower_run(body), plain_tower(lambda worker, _: 1.0 - worker), atol=TOLERANCE)


DENSE = TableSpec("dense", "dense", size=2, rule=Rule("sgd", 1.0))


def pushed(numbers: list[list[float]]) -> Any:
    """The weights after one step of two workers with gradients 1 and 4; a worker's numbers stand in its push."""
    server = Server(num_workers=2)
    workers = [Talk(server, client=7 + i, worker=i) for i in range(2)]
    workers[0].create(DENSE)
    replies = []
    for talk, told, grad in zip(workers, numbers, (1.0, 4.0), strict=True):
        arrays = [Array(0, np.array([[np.nan, *told]])), keys_of(DENSE, []), values_of(DENSE, [[grad], [grad]])]
        replies += talk.send(talk.message(Command.PUSH, *arrays, once=True, flags=SYNC))
    for reply in replies:
        assert_ok(reply)
    return -workers[0].pull(DENSE, [0, 2]).reshape(-1)[0]


def test_a_worker_of_before_which_sends_no_number_makes_all_count_alike() -> None:
    assert pushed([[], []]) == pushed([[np.nan], [np.nan]]) == 2.5
    assert pushed([[np.nan, 1.0], [np.nan]]) == pushed([[np.nan, 3.0], []]) == 2.5
    assert pushed([[np.nan, 1.0], [np.nan, 3.0]]) == 3.25
    assert pushed([[np.nan, 0.0], [np.nan, 0.0]]) == 2.5


@pytest.mark.parametrize("number", [-1.0, np.nan, np.inf])
def test_a_number_of_samples_that_is_none_is_refused(number: float) -> None:
    talk = Talk(Server(num_workers=1))
    talk.create(DENSE)
    arrays = [Array(0, np.array([[0.1, 0.0, number]])), keys_of(DENSE, []), values_of(DENSE, [[1.0], [1.0]])]
    kind, text = refusal(talk.ask(Command.PUSH, *arrays, once=True, flags=SYNC))
    assert (kind, "samples" in text) == ("WireError", True)


@pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
def test_it_is_refused_where_no_mean_is_taken(mode: str) -> None:
    with pytest.raises(StrategyError, match=naming("sync_mean='workers'", "sync_mean")):
        DistributedStrategy(sync_mean="workers", **jobs.MODES[mode]).freeze("a test")
    with pytest.raises(StrategyError, match=naming("sync_mean", "'samples'", "'workers'")):
        DistributedStrategy(sync_mean="batches")
