"""The sync mode: training with workers and servers is training in one process on the combined batch.

The tolerance of the comparisons with torch is 1e-6 of the largest number of a parameter (at least of 0.1). Both sides
compute in float32 (one rounding: 6e-8) but sum in different orders: torch sums the gradient over the combined batch,
the servers take the mean of the workers' sums. Ten steps of such differences stay below 1e-6 only where the rule does
not magnify them. Adam and Adagrad do when they divide by (almost) nothing, a gradient that cancels out by its own
size; so the comparisons with several workers use an eps, or a first accumulator, that is not tiny. With one worker
torch's defaults are used.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.grids import covering
from support.jobs import (
    TABLES,
    Net,
    Part,
    assert_equal_values,
    combined,
    fleet_optimizer,
    plain_step,
    values_of,
    worker_batches,
)

import torchfleet

TOLERANCE = 1e-6
STEPS = 10
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.02},
    "adam": {"lr": 0.02, "eps": 1e-4},
}


def train(part: Part) -> list[float]:
    return [part.step(batch) for batch in worker_batches(part.index, STEPS)]


@functools.cache
def plain(rule: str, num_workers: int) -> dict[str, torch.Tensor]:
    """One process of torch on the combined batches."""
    torch.manual_seed(0)
    model = Net()
    optimizers = jobs.plain_optimizers(rule, model, **RULES[rule])
    for batches in zip(*(worker_batches(i, STEPS) for i in range(num_workers)), strict=True):
        plain_step(model, optimizers, combined(batches))
    return values_of(model)


def alone_and_plain(
    make_model: Callable[[], torch.nn.Module], seed: int = 0
) -> tuple[Callable[[], torch.nn.Module], torch.nn.Module]:
    """A factory of models for a job, and the same model for plain torch, with worker 0's first values."""
    torch.manual_seed(seed)
    return make_model, make_model()


@pytest.mark.parametrize(("rule", "num_servers", "num_workers"), covering(list(RULES), [1, 2, 3], [1, 2, 3]))
def test_all_parameters_equal_one_process_on_the_combined_batches(
    rule: str, num_servers: int, num_workers: int
) -> None:
    done = jobs.run(train, Net, fleet_optimizer(rule, **RULES[rule]), num_workers=num_workers, num_servers=num_servers)
    assert_equal_values(done.values(**TABLES), plain(rule, num_workers), TOLERANCE)
    for part in done.parts[1:]:
        others = {name: value.detach() for name, value in part.model.named_parameters() if len(value)}
        own = {name: value for name, value in done.values(**TABLES).items() if name in others}
        assert_equal_values(others, own)  # every worker ends with the same dense parameters, to the bit


@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_one_worker_equals_torch_with_its_default_options(rule: str) -> None:
    done = jobs.run(train, Net, fleet_optimizer(rule, lr=0.01), num_servers=2)
    torch.manual_seed(0)
    model = Net()
    optimizers = jobs.plain_optimizers(rule, model, lr=0.01)
    for batch in worker_batches(0, STEPS):
        plain_step(model, optimizers, batch)
    assert_equal_values(done.values(**TABLES), values_of(model), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_repeated_run_is_equal_to_the_bit(rule: str) -> None:
    runs = [jobs.run(train, Net, fleet_optimizer(rule, **RULES[rule]), num_workers=3, num_servers=2) for _ in range(2)]
    assert_equal_values(runs[0].values(**TABLES), runs[1].values(**TABLES))
    assert runs[0].results == runs[1].results


@each_of("rule", RULES)
@each_of("num_workers", [1, 3])
def test_one_server_and_three_servers_are_equal_to_the_bit(rule: str, num_workers: int) -> None:
    runs = [
        jobs.run(train, Net, fleet_optimizer(rule, **RULES[rule]), num_workers=num_workers, num_servers=num_servers)
        for num_servers in (1, 3)
    ]
    assert_equal_values(runs[0].values(**TABLES), runs[1].values(**TABLES))
    assert runs[0].results == runs[1].results


def test_losses_of_the_workers_average_to_the_loss_of_the_combined_batch() -> None:
    done = jobs.run(train, Net, fleet_optimizer("sgd", lr=0.1), num_workers=2)
    torch.manual_seed(0)
    model = Net()
    optimizers = jobs.plain_optimizers("sgd", model, lr=0.1)
    batches = zip(worker_batches(0, STEPS), worker_batches(1, STEPS), strict=True)
    expected = [plain_step(model, optimizers, combined(pair)) for pair in batches]
    assert [sum(pair) / 2 for pair in zip(*done.results, strict=True)] == pytest.approx(expected, rel=1e-5)


def test_every_worker_starts_from_the_weights_of_worker_0() -> None:
    def look(part: Part) -> dict[str, torch.Tensor]:
        batch = jobs.make_batch(0)
        seen = {"items": part.model.items(batch["items"]).detach()}
        return {**seen, "hidden": part.model.hidden.weight.detach().clone()}

    done = jobs.run(look, Net, fleet_optimizer("sgd", lr=0.1), num_workers=3, num_servers=2)
    torch.manual_seed(0)
    model = Net()
    expected = {"items": model.items(jobs.make_batch(0)["items"]).detach(), "hidden": model.hidden.weight.detach()}
    for found in done.results:
        assert_equal_values(found, expected)


def test_frozen_dense_parameters_too_start_from_those_of_worker_0() -> None:
    """What the workers compute must be one model, also where it does not learn."""

    def make() -> Net:
        model = Net()
        model.hidden.weight.requires_grad_(False)
        return model

    done = jobs.run(
        lambda part: part.model.hidden.weight.detach().clone(), make, fleet_optimizer("sgd", lr=0.1), num_workers=2
    )
    assert torch.equal(done.results[0], done.results[1])


def test_two_calls_of_the_model_in_one_step_both_learn() -> None:
    """As a pair of towers does."""

    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        batches = worker_batches(0, STEPS)
        for left, right in zip(batches[::2], batches[1::2], strict=True):
            (model(left) - model(right)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    done = jobs.run(lambda part: loop(part.model, part.optimizer), Net, fleet_optimizer("sgd", lr=0.1), num_servers=2)
    _, model = alone_and_plain(Net)
    loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_equal_values(done.values(**TABLES), values_of(model), TOLERANCE)


def test_a_model_without_dense_parameters_trains() -> None:
    class OnlyRows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = torch.nn.Embedding(jobs.NUM_ITEMS, 4, sparse=True)

        def forward(self, batch: jobs.Batch) -> torch.Tensor:
            return self.items(batch["items"]).sum(dim=(1, 2))

    done = jobs.run(train, OnlyRows, fleet_optimizer("sgd", lr=0.1), num_workers=2, num_servers=2)
    _, model = alone_and_plain(OnlyRows)
    optimizers = jobs.plain_optimizers("sgd", model, lr=0.1)
    for pair in zip(worker_batches(0, STEPS), worker_batches(1, STEPS), strict=True):
        plain_step(model, optimizers, combined(pair))
    assert_equal_values(done.values(items=jobs.NUM_ITEMS), values_of(model), TOLERANCE)


def test_a_model_without_embeddings_trains_with_more_servers_than_numbers() -> None:
    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(5, 1, bias=False)
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, batch: jobs.Batch) -> torch.Tensor:
            return self.lin(batch["x"]).squeeze(1) * self.scale

    def groups(model: Tiny) -> torch.optim.Optimizer:  # a table of 5 numbers, and one of 1, on 7 servers
        return torch.optim.Adam([{"params": [model.lin.weight]}, {"params": [model.scale], "lr": 0.1}], lr=0.01)

    done = jobs.run(train, Tiny, groups, num_workers=2, num_servers=7)
    _, model = alone_and_plain(Tiny)
    optimizer = groups(model)
    for pair in zip(worker_batches(0, STEPS), worker_batches(1, STEPS), strict=True):
        plain_step(model, [optimizer], combined(pair))
    assert_equal_values(done.values(), values_of(model), TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
def test_sparse_embedding_equals_a_torch_embedding_with_the_same_first_rows(rule: str) -> None:
    class Fleet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = torchfleet.nn.SparseEmbedding(4, initializer=torchfleet.nn.Normal(0.0, 0.3), padding_idx=0)
            self.tags = torchfleet.nn.SparseEmbedding(4, pooling="mean", seed=5)
            self.out = torch.nn.Linear(12, 1)

        def forward(self, batch: jobs.Batch) -> torch.Tensor:
            tags = self.tags(batch["tags"], batch["offsets"])
            return self.out(torch.cat([self.items(batch["items"]).flatten(1), tags], dim=1)).squeeze(1)

    class Plain(Fleet):
        def __init__(self) -> None:
            super().__init__()
            self.items = torch.nn.Embedding(jobs.NUM_ITEMS, 4, padding_idx=0, sparse=True)
            self.tags = torch.nn.EmbeddingBag(jobs.NUM_TAGS, 4, mode="mean", sparse=True)

    done = jobs.run(train, Fleet, fleet_optimizer(rule, **RULES[rule]), num_workers=2, num_servers=3)
    model = Plain()
    torch.manual_seed(0)
    model.out.load_state_dict(Fleet().out.state_dict())
    with torch.no_grad():
        model.items.weight.copy_(jobs.first_rows(done.parts[0], "items", range(jobs.NUM_ITEMS)))
        model.items.weight[0] = 0
        model.tags.weight.copy_(jobs.first_rows(done.parts[0], "tags", range(jobs.NUM_TAGS)))
    optimizers = jobs.plain_optimizers(rule, model, **RULES[rule])
    seen: dict[str, set[int]] = {"items": set(), "tags": set()}
    for pair in zip(worker_batches(0, STEPS), worker_batches(1, STEPS), strict=True):
        batch = combined(pair)
        plain_step(model, optimizers, batch)
        for name, ids in seen.items():
            ids.update(batch[name].flatten().tolist())
    with torch.no_grad():  # ids that never appeared have no row, and read as zeros
        model.items.weight[[i for i in range(jobs.NUM_ITEMS) if i not in seen["items"]]] = 0
        model.tags.weight[[i for i in range(jobs.NUM_TAGS) if i not in seen["tags"]]] = 0
    found = done.values(items=jobs.NUM_ITEMS, tags=jobs.NUM_TAGS)
    assert_equal_values(found, values_of(model), TOLERANCE)


def test_modules_that_share_a_table_train_the_same_rows() -> None:
    class Fleet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = torchfleet.nn.SparseEmbedding(3, name="both")
            self.right = torchfleet.nn.SparseEmbedding(3, name="both")

        def forward(self, batch: jobs.Batch) -> torch.Tensor:
            return (self.left(batch["items"][:, 0]) * self.right(batch["items"][:, 1])).sum(dim=1)

    class Plain(Fleet):
        def __init__(self) -> None:
            super().__init__()
            self.left = self.right = torch.nn.Embedding(jobs.NUM_ITEMS, 3, sparse=True)

    done = jobs.run(train, Fleet, fleet_optimizer("sgd", lr=0.5), num_workers=2, num_servers=2)
    model = Plain()
    with torch.no_grad():
        model.left.weight.copy_(jobs.first_rows(done.parts[0], "both", range(jobs.NUM_ITEMS)))
    optimizers = jobs.plain_optimizers("sgd", model, lr=0.5)
    for pair in zip(worker_batches(0, STEPS), worker_batches(1, STEPS), strict=True):
        plain_step(model, optimizers, combined(pair))
    used = jobs.NUM_ITEMS // 2  # make_batch uses ids below it, and all of them
    assert_equal_values({"both": done.rows("both", used)}, {"both": model.left.weight.detach()[:used]}, TOLERANCE)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_param_groups_have_their_own_rate_betas_and_weight_decay(make: type[torch.optim.Optimizer]) -> None:
    def groups(model: Net, sparse: bool = True) -> list[dict[str, Any]]:
        dense = [
            {"params": [model.hidden.weight], "lr": 0.03, "weight_decay": 0.1},
            {"params": [model.hidden.bias, model.out.bias], "betas": (0.5, 0.9)},
            {"params": [model.out.weight], "eps": 1e-3},
        ]
        rows = jobs.split_parameters(model)[1]
        return [*dense, {"params": rows, "lr": 0.05, "betas": (0.8, 0.99), "weight_decay": 0.0}] if sparse else dense

    options = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.05}
    done = jobs.run(train, Net, lambda model: make(groups(model), **options), num_workers=2, num_servers=2)
    _, model = alone_and_plain(Net)
    rows = torch.optim.SparseAdam(jobs.split_parameters(model)[1], lr=0.05, betas=(0.8, 0.99), eps=1e-4)
    optimizers = [make(groups(model, sparse=False), **options), rows]
    for pair in zip(worker_batches(0, STEPS), worker_batches(1, STEPS), strict=True):
        plain_step(model, optimizers, combined(pair))
    assert_equal_values(done.values(**TABLES), values_of(model), TOLERANCE)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_and_weight_decay_act_on_dense_parameters(nesterov: bool) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        dense, sparse = jobs.split_parameters(model)
        return torch.optim.SGD(
            [
                {"params": dense, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.01},
                {"params": sparse, "lr": 0.3},
            ],
            lr=0.02,
        )

    done = jobs.run(train, Net, make, num_workers=2, num_servers=3)
    _, model = alone_and_plain(Net)
    optimizer = make(model)
    for pair in zip(worker_batches(0, STEPS), worker_batches(1, STEPS), strict=True):
        plain_step(model, [optimizer], combined(pair))
    assert_equal_values(done.values(**TABLES), values_of(model), TOLERANCE)


def scheduled(part: Part, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    for batch in worker_batches(part.index, STEPS):
        part.step(batch)
        scheduler.step()


def plainly_scheduled(rule: str) -> dict[str, torch.Tensor]:
    _, model = alone_and_plain(Net)
    optimizers = jobs.plain_optimizers(rule, model, **RULES[rule])
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5) for optimizer in optimizers]
    for pair in zip(worker_batches(0, STEPS), worker_batches(1, STEPS), strict=True):
        plain_step(model, optimizers, combined(pair))
        for scheduler in schedulers:
            scheduler.step()
    return values_of(model)


IN_ORDER = pytest.mark.filterwarnings("error:Detected call of .lr_scheduler:UserWarning")
"""torch warns where a scheduler steps before its optimizer: here it never does."""


@IN_ORDER
@pytest.mark.parametrize("rule", RULES)
def test_a_scheduler_on_the_distributed_optimizer_reaches_the_servers(rule: str) -> None:
    def body(part: Part) -> None:
        scheduled(part, torch.optim.lr_scheduler.StepLR(part.optimizer, 3, gamma=0.5))

    done = jobs.run(body, Net, fleet_optimizer(rule, **RULES[rule]), num_workers=2, num_servers=2)
    assert_equal_values(done.values(**TABLES), plainly_scheduled(rule), TOLERANCE)


@IN_ORDER
@pytest.mark.parametrize("rule", RULES)
def test_a_scheduler_made_before_on_the_inner_optimizer_reaches_the_servers(rule: str) -> None:
    schedulers = []

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = fleet_optimizer(rule, **RULES[rule])(model)
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5))
        return optimizer

    done = jobs.run(lambda part: scheduled(part, schedulers[part.index]), Net, make, num_workers=2, num_servers=2)
    assert_equal_values(done.values(**TABLES), plainly_scheduled(rule), TOLERANCE)


def test_gradients_of_two_backward_passes_add_up() -> None:
    def accumulate(model: torch.nn.Module, optimizers: list[Any], batches: list[jobs.Batch]) -> None:
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            jobs.loss_of(model, first).backward()
            jobs.loss_of(model, second).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    batches = worker_batches(0, STEPS)
    done = jobs.run(
        lambda part: accumulate(part.model, [part.optimizer], batches),
        Net,
        fleet_optimizer("adam", **RULES["adam"]),
        num_servers=2,
    )
    _, model = alone_and_plain(Net)
    accumulate(model, jobs.plain_optimizers("adam", model, **RULES["adam"]), batches)
    assert_equal_values(done.values(**TABLES), values_of(model), TOLERANCE)


def test_workers_that_accumulate_still_make_one_update_per_step() -> None:
    def body(part: Part) -> None:
        batches = worker_batches(part.index, STEPS)
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            (jobs.loss_of(part.model, first) / 2).backward()
            (jobs.loss_of(part.model, second) / 2).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()

    done = jobs.run(body, Net, fleet_optimizer("sgd", lr=0.1), num_workers=2)
    _, model = alone_and_plain(Net)
    optimizers = jobs.plain_optimizers("sgd", model, lr=0.1)
    own = [worker_batches(0, STEPS), worker_batches(1, STEPS)]
    for i in range(0, STEPS, 2):
        plain_step(model, optimizers, combined([own[0][i], own[0][i + 1], own[1][i], own[1][i + 1]]))
    assert_equal_values(done.values(**TABLES), values_of(model), TOLERANCE)
    assert done.servers.table("items").step == STEPS // 2


@pytest.mark.parametrize("place", ["before forward", "between forward and backward", "after step", "never needed"])
def test_zero_grad_may_stand_anywhere_in_the_loop(place: str) -> None:
    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        for batch in worker_batches(0, STEPS):
            if place == "before forward":
                optimizer.zero_grad()
            loss = jobs.loss_of(model, batch)
            if place == "between forward and backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if place == "after step":
                optimizer.zero_grad()
            if place == "never needed":
                model.zero_grad()

    done = jobs.run(lambda part: loop(part.model, part.optimizer), Net, fleet_optimizer("sgd", lr=0.1))
    _, model = alone_and_plain(Net)
    loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_equal_values(done.values(**TABLES), values_of(model), TOLERANCE)


def test_zero_grad_drops_the_gradients_of_rows() -> None:
    with jobs.one_worker(Net()) as part:
        before = part.rows("items", range(jobs.NUM_ITEMS))
        jobs.loss_of(part.model, jobs.make_batch(0)).backward()
        part.optimizer.zero_grad()
        part.optimizer.step()
        assert torch.equal(part.rows("items", range(jobs.NUM_ITEMS)), before)


def test_step_takes_a_closure() -> None:
    def loop(model: torch.nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for batch in worker_batches(0, STEPS):

            def closure(batch: jobs.Batch = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = jobs.loss_of(model, batch)
                loss.backward()
                return loss

            losses.append(float(optimizer.step(closure)))
        return losses

    done = jobs.run(lambda part: loop(part.model, part.optimizer), Net, fleet_optimizer("sgd", lr=0.1))
    _, model = alone_and_plain(Net)
    assert done.results[0] == pytest.approx(loop(model, torch.optim.SGD(model.parameters(), lr=0.1)), rel=1e-5)
    assert_equal_values(done.values(**TABLES), values_of(model), TOLERANCE)


def test_a_second_backward_through_an_old_graph_counts_for_the_next_step() -> None:
    """As in torch: the graph of a loss that is linear in the rows stays good after a step."""

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = torch.nn.Embedding(4, 2, sparse=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.items(ids).sum()

    def loop(model: torch.nn.Module, optimizer: Any) -> None:
        loss = model(torch.tensor([1, 2, 2]))
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model = Sum()
    expected = copy.deepcopy(model)
    loop(expected, torch.optim.SGD(expected.parameters(), lr=0.5))
    with jobs.one_worker(model) as part:
        loop(part.model, part.optimizer)
        assert torch.allclose(part.rows("items", range(4)), expected.items.weight, rtol=0, atol=1e-6)


def test_a_worker_that_ends_earlier_is_not_waited_for() -> None:
    """Uneven data: the steps that only worker 0 makes are averaged over one worker."""

    def body(part: Part) -> None:
        for batch in worker_batches(part.index, 6 if part.index == 0 else 3):
            part.step(batch)

    done = jobs.run(body, Net, fleet_optimizer("sgd", lr=0.1), num_workers=2, num_servers=2)
    _, model = alone_and_plain(Net)
    optimizers = jobs.plain_optimizers("sgd", model, lr=0.1)
    own = [worker_batches(0, 6), worker_batches(1, 3)]
    for i in range(6):
        plain_step(model, optimizers, combined([batches[i] for batches in own if i < len(batches)]))
    assert_equal_values(done.values(**TABLES), values_of(model), TOLERANCE)


def test_values_that_were_pulled_once_do_not_make_later_gradients_look_old() -> None:
    """A reply that a server repeats after a restart has no values: the worker pulls them, and how new they are."""
    with jobs.one_worker(Net()) as part:
        assert part.worker is not None
        for number, batch in enumerate(worker_batches(0, 8)):
            part.step(batch)
            if number == 1:
                part.worker.communicator.end_threads()
        tables = part.worker.stats()["servers"][0]["tables"].values()
    ages = [table["staleness"] for table in tables if table["kind"] == "dense"]
    assert ages
    assert all(set(found) <= {0} for found in ages), ages


def test_a_dense_parameter_without_gradient_counts_as_gradient_zero() -> None:
    class Half(Net):
        def forward(self, batch: jobs.Batch) -> torch.Tensor:
            return self.hidden(torch.cat([torch.zeros(len(batch["y"]), 13), batch["x"]], dim=1)).sum(dim=1)

    model = Half()
    out = model.out.weight.detach().clone()
    with jobs.one_worker(model) as part:
        for batch in worker_batches(0, 3):
            part.step(batch)
        assert part.model.out.weight.grad is None
        assert torch.equal(part.model.out.weight, out)


def test_over_sockets_the_result_is_that_of_servers_in_process() -> None:
    rule = fleet_optimizer("adam", **RULES["adam"])
    servers = jobs.SocketServers(Net, rule, 2, num_workers=2)
    servers.start()
    try:
        parts = [jobs.make_part(Net, rule, jobs.strategy(), servers.info(i, 2)) for i in range(2)]

        def work(index: int) -> dict[str, torch.Tensor]:
            part = parts[index]
            part.worker = jobs.WorkerRole(part.job)
            train(part)
            part.barrier()
            rows = {name: part.rows(name, range(num)) for name, num in TABLES.items()}
            part.worker.stop()
            return {**{name: p.detach() for name, p in part.model.named_parameters() if len(p)}, **rows}

        found = jobs.in_threads(work, 2)
        assert servers.is_over(), "servers must end when the last worker has stopped"
    finally:
        servers.close()
    done = jobs.run(train, Net, rule, num_workers=2, num_servers=2)
    for values in found:
        assert_equal_values(values, done.values(**TABLES))
