"""The distributed optimizer stands where the user's stood: an Optimizer to schedulers, hooks and the user's own code,
and whatever is changed on it acts on the servers or is refused; nothing is accepted and ignored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Net, Part, assert_equal_values, one_worker, worker_batches
from support.messages import naming

from torchfleet.base.errors import FleetError, ModelError
from torchfleet.ps.worker.distributed_optimizer import DistributedOptimizer

TOLERANCE = 1e-6  # see modes/test_communicator.py


def groups(model: torch.nn.Module, **dense_options: Any) -> list[dict[str, Any]]:
    dense, sparse = jobs.split_parameters(model)
    return [{"params": dense, **dense_options}, {"params": sparse}]


def values(part: Part) -> dict[str, torch.Tensor]:
    dense = {name: p.detach().clone() for name, p in part.model.named_parameters() if len(p)}
    return {**dense, **{name: part.rows(name, range(num)) for name, num in jobs.TABLES.items()}}


def against_torch(
    make: Callable[[torch.nn.Module], torch.optim.Optimizer], loop: Callable[[torch.nn.Module, Any], None]
) -> None:
    """The same loop with torch's optimizer and with the distributed one; refusing is as good as doing it."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    loop(plain, make(plain))
    servers = jobs.Servers(2)
    part = jobs.make_part(lambda: model, make, jobs.strategy(), jobs.roles(1, 2)[0])
    servers.make_tables(part.job)
    part.worker = jobs.Worker(part.job, servers)
    try:
        loop(part.model, part.optimizer)
    except FleetError:
        return
    assert_equal_values(values(part), jobs.values_of(plain), TOLERANCE)


def steps(model: torch.nn.Module, optimizer: Any, batches: list[jobs.Batch]) -> None:
    for batch in batches:
        jobs.plain_step(model, [optimizer], batch)


def test_it_is_an_optimizer_with_the_param_groups_of_the_inner_one() -> None:
    model = Net()
    inner: list[torch.optim.Optimizer] = []

    def make(made: torch.nn.Module) -> torch.optim.Optimizer:
        inner.append(torch.optim.Adam(made.parameters(), lr=0.25))
        return inner[0]

    with one_worker(model, make) as part:
        assert isinstance(part.optimizer, torch.optim.Optimizer)
        assert isinstance(part.optimizer, DistributedOptimizer)
        assert part.optimizer.param_groups is inner[0].param_groups
        assert part.optimizer.defaults["lr"] == 0.25
        assert "lr: 0.25" in repr(part.optimizer)


def test_step_before_init_worker_says_what_to_call() -> None:
    part = jobs.make_part(Net, jobs.sgd, jobs.strategy(), jobs.roles(1, 1)[0])
    part.optimizer.zero_grad()  # harmless
    with pytest.raises(FleetError, match=naming("fleet.init_worker()")):
        part.optimizer.step()


def test_a_rate_set_by_hand_acts_from_the_next_step_on() -> None:
    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        for rate, batch in zip((0.1, 0.0, 0.4), worker_batches(0, 3), strict=True):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.param_groups[1]["lr"] = 2 * rate
            jobs.plain_step(model, [optimizer], batch)

    against_torch(lambda model: torch.optim.SGD(groups(model), lr=1.0), loop)


def test_the_step_returns_the_loss_of_the_closure_and_none_without() -> None:
    with one_worker(Net()) as part:
        assert part.optimizer.step() is None
        assert part.optimizer.step(lambda: torch.tensor(3.0)) == 3.0


def test_zero_grad_clears_dense_gradients_as_torch_does() -> None:
    with one_worker(Net()) as part:
        jobs.loss_of(part.model, jobs.make_batch(0)).backward()
        part.optimizer.zero_grad(set_to_none=False)
        assert not part.model.out.weight.grad.any()
        part.optimizer.zero_grad()
        assert part.model.out.weight.grad is None


def test_a_step_without_any_backward_counts_and_moves_nothing_under_sgd() -> None:
    servers = jobs.Servers(2)
    with one_worker(Net(), servers=servers) as part:
        before = values(part)
        for _ in range(3):
            part.optimizer.step()
        assert_equal_values(values(part), before)
    assert servers.table("items").step == 3


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
            milestones=[3],
        ),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=9, cycle_momentum=False),
    ],
    ids=["cosine", "lambda", "sequential", "one cycle"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_schedulers_of_torch_work_on_it(make_scheduler: Callable[[Any], Any]) -> None:
    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        scheduler = make_scheduler(optimizer)
        for batch in worker_batches(0, 8):
            jobs.plain_step(model, [optimizer], batch)
            scheduler.step()

    against_torch(lambda model: torch.optim.SGD(groups(model), lr=0.2), loop)


def test_a_scheduler_on_the_inner_optimizer_and_one_on_the_distributed_leave_step_its_own() -> None:
    """A scheduler wraps the step of the optimizer that it was given; the distributed step must stay the servers'."""
    schedulers: list[Any] = []

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        schedulers.append(torch.optim.lr_scheduler.StepLR(inner, 1))
        return inner

    servers = jobs.Servers()
    with one_worker(Net(), make, servers=servers) as part:
        part.step(jobs.make_batch(0))
        assert servers.counts("PUSH") == [1]


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (lambda m: torch.optim.SGD(groups(m, momentum=0.5), lr=0.1), "momentum", 0.9),
        (lambda m: torch.optim.SGD(groups(m, weight_decay=0.1), lr=0.1), "weight_decay", 0.0),
        (lambda m: torch.optim.SGD(groups(m), lr=0.1), "weight_decay", 0.5),
    ],
)
def test_another_option_changed_later_reaches_the_servers_or_is_refused(
    make: Callable[[torch.nn.Module], torch.optim.Optimizer], option: str, value: float
) -> None:
    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        batches = worker_batches(0, 6)
        steps(model, optimizer, batches[:3])
        optimizer.param_groups[0][option] = value
        steps(model, optimizer, batches[3:])

    against_torch(make, loop)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_schedule_that_moves_the_momentum_too_reaches_the_servers_or_is_refused() -> None:
    """torch's OneCycleLR does so unless it is told not to."""

    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        for batch in worker_batches(0, 8):
            jobs.plain_step(model, [optimizer], batch)
            scheduler.step()

    class DenseNet(Net):
        """No embeddings: their group has no momentum, which OneCycleLR asks of all groups."""

        def __init__(self) -> None:
            super().__init__()
            del self.items, self.words, self.tags

        def forward(self, batch: jobs.Batch) -> torch.Tensor:
            return self.hidden(torch.cat([batch["x"], torch.zeros(len(batch["x"]), 13)], dim=1)).sum(dim=1)

    torch.manual_seed(0)
    model = DenseNet()
    plain = copy.deepcopy(model)
    loop(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    with one_worker(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) as part:
        try:
            loop(part.model, part.optimizer)
        except FleetError:
            return
        torch.testing.assert_close(part.model.hidden.weight, plain.hidden.weight, rtol=0, atol=1e-6)


def test_a_group_added_later_trains_or_is_refused() -> None:
    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        batches = worker_batches(0, 6)
        steps(model, optimizer, batches[:3])
        optimizer.add_param_group({"params": [model.out.weight], "lr": 0.5})
        steps(model, optimizer, batches[3:])

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        chosen = [p for p in model.parameters() if p is not model.out.weight]
        return torch.optim.SGD(chosen, lr=0.1)

    against_torch(make, loop)


def test_a_backbone_that_is_frozen_first_trains_as_in_torch() -> None:
    """What the error of add_param_group advises."""

    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        batches = worker_batches(0, 6)
        model.out.weight.requires_grad_(False)
        steps(model, optimizer, batches[:3])
        model.out.weight.requires_grad_(True)
        steps(model, optimizer, batches[3:])

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        others = [p for p in model.parameters() if p is not model.out.weight]
        return torch.optim.SGD([{"params": others}, {"params": [model.out.weight], "lr": 0.5}], lr=0.1)

    against_torch(make, loop)
    with (
        one_worker(Net()) as part,
        pytest.raises(ModelError, match=naming("add_param_group", "requires_grad_(False)")),
    ):
        part.optimizer.add_param_group({"params": []})


def test_a_rate_loaded_with_load_state_dict_acts_or_is_refused() -> None:
    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        batches = worker_batches(0, 6)
        steps(model, optimizer, batches[:3])
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group["lr"] = 0.01
        optimizer.load_state_dict(state)
        steps(model, optimizer, batches[3:])

    against_torch(lambda model: torch.optim.SGD(groups(model), lr=0.3), loop)


def test_hooks_around_the_step_are_called() -> None:
    called: list[str] = []
    with one_worker(Net()) as part:
        part.optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        part.optimizer.register_step_post_hook(lambda *_: called.append("after"))
        part.step(jobs.make_batch(0))
    assert called == ["before", "after"]


@each_of("mode", list(jobs.MODES))
def test_the_loop_is_the_same_in_every_mode(mode: str) -> None:
    with one_worker(Net(), mode=mode, num_servers=2) as part:
        losses = []
        for _ in range(20):
            losses.append(part.step(jobs.make_batch(0)))
            part.flush()
        assert losses[-1] < 0.5 * losses[0]
        assert part.stats()["steps"] == 20
