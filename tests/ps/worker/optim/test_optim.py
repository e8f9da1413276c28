"""fleet.optim: as optimizers of torch, as the rules of whole jobs, and as the rule of one table."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.cases import each_of
from support.jobs import Part
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import ModelError, StrategyError

STEPS = 6
KINDS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "rowwise": lambda p: fleet.optim.RowWiseAdagrad(p, lr=0.1),
    "rowwise momentum": lambda p: fleet.optim.RowWiseAdagrad(p, lr=0.1, momentum=0.5),
    "ftrl": lambda p: fleet.optim.FTRL(p, lr=0.1, l1=0.01, l2=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rmsprop both": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, centered=True, momentum=0.5),
    "lion": lambda p: fleet.optim.Lion(p, lr=0.01),
}


class Layers(torch.nn.Module):
    """An embedding of torch, or of ours in the same place, and a tower."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.ids: torch.nn.Module = torch.nn.Embedding(40, 4, sparse=True)
        if options:
            options = {"num_embeddings": 40, **options}
            self.ids = fleet.nn.SparseEmbedding(4, name="ids", initializer=fleet.nn.Uniform(-0.5, 0.5), **options)
        self.tower = torch.nn.Linear(8, 1)

    def forward(self, batch: jobs.Batch) -> torch.Tensor:
        return torch.tanh(self.tower(self.ids(batch["items"]).flatten(1))).squeeze(1)


BATCHES = jobs.worker_batches(0, STEPS)


def start_of(part: Part) -> dict[str, torch.Tensor]:
    rows = part.worker.client.pull("ids", np.arange(40)).result()
    tower = {f"tower.{name}": value.clone() for name, value in part.model.tower.state_dict().items()}
    return {"ids.weight": torch.from_numpy(rows), **tower}


def trained(part: Part) -> dict[str, torch.Tensor]:
    """The first values, before the steps."""
    start = start_of(part)
    for batch in BATCHES:
        part.step(batch)
        part.flush()
    return start


def values_of(part: Part) -> dict[str, torch.Tensor]:
    return {"ids": part.rows("ids", range(40)), **dict(part.model.tower.named_parameters(prefix="tower"))}


def row_by_row(make_rows: Any, make_tower: Any, start: dict[str, torch.Tensor], dense_rows: bool) -> Any:
    """Plain torch. The oracle of torch's optimizers without sparse gradients is a parameter for every row."""
    model = Layers()
    model.load_state_dict(start)
    rows = [torch.nn.Parameter(row.clone()[None]) for row in model.ids.weight.detach()]
    steppers = [make_rows([row]) for row in rows] if dense_rows else [make_rows([model.ids.weight])]
    tower = make_tower(model.tower.parameters())
    for batch in BATCHES:
        jobs.loss_of(model, batch).backward()
        grad = model.ids.weight.grad.coalesce()
        if dense_rows:
            for row in rows:
                row.grad = None
            for key, values in zip(grad.indices()[0].tolist(), grad.values(), strict=True):
                rows[key].grad = values[None].clone()
        for optimizer in (*steppers, tower):
            optimizer.step()
        if dense_rows:
            with torch.no_grad():
                model.ids.weight.copy_(torch.cat(rows))
        model.zero_grad()
    return {"ids": model.ids.weight.detach(), **dict(model.tower.named_parameters(prefix="tower"))}


@each_of("mode", ["sync", "async", "hybrid"])
@each_of("name", KINDS)
def test_a_job_is_trained_as_plain_torch_trains_the_rows_that_a_step_touches(name: str, mode: str) -> None:
    make = KINDS[name]
    with jobs.one_worker(Layers(state="none"), lambda m: make(m.parameters()), mode=mode, num_servers=2) as part:
        start = trained(part)
        values = values_of(part)
        is_torch = type(make([torch.nn.Parameter(torch.zeros(1))])).__module__.startswith("torch.")
        jobs.assert_equal_values(values, row_by_row(make, make, start, is_torch), 2e-5)


@pytest.mark.parametrize("name", ["rowwise", "ftrl", "lion", "rmsprop both"])
def test_two_workers_in_sync_train_as_one_with_their_mean(name: str) -> None:
    def body(part: Part) -> None:
        for batch in jobs.worker_batches(part.index, 4):
            part.step(batch)

    def make(model: torch.nn.Module) -> Any:
        return KINDS[name](model.parameters())

    done = jobs.run(body, lambda: Layers(state="none"), make, num_workers=2, num_servers=2)
    one = [jobs.combined(pair) for pair in zip(*(jobs.worker_batches(i, 4) for i in range(2)), strict=True)]

    def alone(part: Part) -> None:
        for batch in one:
            part.step(batch)

    expected = jobs.run(alone, lambda: Layers(state="none"), make)
    jobs.assert_equal_values(done.values(ids=40), expected.values(ids=40), 1e-4)


def test_geo_trains_rows_with_momentum_as_one_process_does() -> None:
    make = KINDS["momentum"]
    with jobs.one_worker(Layers(state="none"), lambda m: make(m.parameters()), mode="geo") as part:
        start = trained(part)
        part.worker.communicator.hand_over()
        jobs.assert_equal_values(values_of(part), row_by_row(make, make, start, True), 1e-5)


def test_geo_refuses_other_rules_and_names_the_table() -> None:
    model = Layers(optimizer=fleet.optim.FTRL(lr=0.1))
    with pytest.raises(StrategyError, match=naming("'ids'", "'ftrl'", "SGD")):
        jobs.one_worker(model, mode="geo").__enter__()


@each_of("mode", ["sync", "hybrid"])
@each_of("name", ["rowwise", "ftrl", "lion", "rmsprop both"])
def test_the_rule_of_one_table_takes_precedence(name: str, mode: str) -> None:
    """The rest is trained by the optimizer of the job; the table's rate changes by a scheduler of its own."""
    own: Any = {
        "rowwise": lambda p=None: fleet.optim.RowWiseAdagrad(p, lr=0.1),
        "ftrl": lambda p=None: fleet.optim.FTRL(p, lr=0.1, l1=0.01),
        "lion": lambda p=None: fleet.optim.Lion(p, lr=0.01),
        "rmsprop both": lambda p=None: fleet.optim.RMSprop(p, lr=0.01, eps=1e-2, centered=True, momentum=0.5),
    }[name]

    def tower(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.02)

    model = Layers(optimizer=own())
    with jobs.one_worker(model, lambda m: tower(m.parameters()), mode=mode) as part:
        assert part.job.plan.sparse["ids"].spec.rule.name in ("rowwise_adagrad", "ftrl", "lion", "rmsprop")
        start = trained(part)
        expected = row_by_row(own, tower, start, name == "rmsprop both")
        jobs.assert_equal_values(values_of(part), expected, 2e-5)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_of_the_tables_own_optimizer_changes_its_rate() -> None:
    model = Layers(optimizer=fleet.optim.SGD(lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(model.ids.optimizer, 1, 0.5)
    with jobs.one_worker(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.0)) as part:
        before, moves = start_of(part)["ids.weight"], []
        for _ in range(3):
            part.model.ids(torch.tensor([3])).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            scheduler.step()
            after = part.rows("ids", range(40))
            moves.append(float((before - after)[3].max()))
            before = after
    assert moves == pytest.approx([1.0, 0.5, 0.25], abs=1e-6)


def test_an_option_of_the_tables_own_optimizer_may_not_change() -> None:
    model = Layers(optimizer=fleet.optim.FTRL(lr=0.1, l1=1.0))
    with jobs.one_worker(model) as part:
        part.step(BATCHES[0])
        model.ids.optimizer.param_groups[0]["l1"] = 2.0
        with pytest.raises(ModelError, match=naming("'ids'", "lr")):
            part.step(BATCHES[1])


def test_a_decoupled_decay_of_rows_is_set_in_their_group() -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        rows = {"params": model.ids.parameters(), "row_weight_decay": 0.5, "row_decoupled_decay": True}
        return torch.optim.SGD([rows, {"params": model.tower.parameters()}], lr=0.1)

    with jobs.one_worker(Layers(state="none"), make) as part:
        part.rows("ids", [3])
        before = torch.from_numpy(part.worker.client.pull("ids", np.array([3])).result())
        (part.model.ids(torch.tensor([3])) * 0.0).sum().backward()
        part.optimizer.step()
        torch.testing.assert_close(part.rows("ids", [3]), before * 0.95)


@pytest.mark.parametrize("name", ["rowwise", "rowwise momentum", "ftrl", "lion"])
def test_dense_and_sparse_gradients_give_the_same_rows(name: str) -> None:
    """In one process. A row-wise sum of a row of one value is that value's own."""
    torch.manual_seed(0)
    start, rng = torch.randn(9, 1), torch.Generator().manual_seed(1)
    sparse, dense = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [KINDS[name]([parameter]) for parameter in (sparse, dense)]
    for _ in range(5):
        grad = torch.randn(9, 1, generator=rng)
        dense.grad = grad.clone()
        sparse.grad = torch.sparse_coo_tensor(torch.arange(9)[None], grad, check_invariants=True)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(sparse, dense)
    assert not torch.equal(dense.detach(), start)


def test_state_is_saved_and_loaded_as_torch_does_it() -> None:
    for name in ("rowwise momentum", "ftrl", "lion"):
        parameter = torch.nn.Parameter(torch.ones(3))
        one = KINDS[name]([parameter])
        parameter.grad = torch.ones(3)
        one.step()
        other = torch.nn.Parameter(parameter.detach().clone())
        two = KINDS[name]([other])
        two.load_state_dict(copy.deepcopy(one.state_dict()))
        other.grad = torch.ones(3)
        one.step()
        two.step()
        assert torch.equal(parameter, other)


def test_hybrid_keeps_the_state_of_the_network_on_the_servers() -> None:
    servers = jobs.Servers(1)
    make = KINDS["ftrl"]
    model = Layers(state="none")
    with jobs.one_worker(model, lambda m: make(m.parameters()), mode="hybrid", servers=servers) as part:
        trained(part)
        hybrid: Any = part.worker._hybrid
        hybrid.put_network()
        _, z, n = servers.table("dense.0").block()
        state = hybrid._network.optimizer.inner.state[part.model.tower.weight]
        assert z[:8].tolist() == state["z"].flatten().tolist()
        assert n[:8].tolist() == state["n"].flatten().tolist()


def test_a_model_with_rules_of_its_own_is_saved_and_resumed(tmp_path: Path) -> None:
    """Through the public functions, in one process: five steps, or three and after a load two."""

    def run(steps: list[jobs.Batch], load: str | None, save: str | None) -> torch.Tensor:
        with jobs.clean_facade():
            torch.manual_seed(0)
            fleet.init()
            model = fleet.distributed_model(Layers(optimizer=fleet.optim.RowWiseAdagrad(lr=0.1, momentum=0.5)))
            optimizer = fleet.distributed_optimizer(torch.optim.RMSprop(model.parameters(), lr=0.01))
            fleet.init_worker(load)
            for batch in steps:
                jobs.plain_step(model, [optimizer], batch)
            if save:
                fleet.save_persistables(save)
            values = model.ids(torch.arange(40)).detach().clone()
            fleet.stop_worker()
            return values

    whole = run(BATCHES[:5], None, None)
    run(BATCHES[:3], None, str(tmp_path / "m"))
    assert torch.equal(run(BATCHES[3:5], str(tmp_path / "m"), None), whole)


# Wrong uses


@each_of(
    ("make", "words"),
    [
        (lambda: fleet.optim.FTRL(lr=0.1, l1=-1.0), ("FTRL", "'l1'", 0)),
        (lambda: fleet.optim.FTRL(lr=-0.1), ("FTRL", "lr", 0)),
        (lambda: fleet.optim.FTRL(lr=0.1, l2="x"), ("FTRL",)),
        (lambda: fleet.optim.Lion(lr=0.1, betas=(1.5, 0.9)), ("Lion", "beta1", "1.5")),
        (lambda: fleet.optim.RowWiseAdagrad(lr=0.1, momentum=1.0), ("RowWiseAdagrad", "momentum")),
        (lambda: fleet.optim.SGD(0.1), ("SGD", "lr=0.1")),
        (lambda: fleet.nn.SparseEmbedding(4, "t", optimizer=torch.optim.SGD), ("'t'", "fleet.optim")),
        (
            lambda: fleet.nn.SparseEmbedding(4, "t", optimizer=KINDS["lion"]([torch.nn.Parameter(torch.zeros(1))])),
            ("'t'", "Lion", "parameters"),
        ),
        (lambda: fleet.nn.SparseEmbedding(4, "t", optimizer=fleet.optim.Adam(amsgrad=True)), ("'t'", "amsgrad")),
    ],
)
def test_wrong_options_are_named(make: Any, words: Any) -> None:
    with pytest.raises(ModelError, match=naming(*words)):
        make()


def test_an_optimizer_without_parameters_does_not_train_a_model() -> None:
    with jobs.clean_facade():
        fleet.init()
        fleet.distributed_model(Layers(state="none"))
        with pytest.raises(ModelError, match=naming("FTRL", "model.parameters()")):
            fleet.distributed_optimizer(fleet.optim.FTRL(lr=0.1))


def test_layers_of_one_table_have_one_optimizer() -> None:
    model = torch.nn.Module()
    for name, rate in (("a", 0.1), ("b", 0.2)):
        setattr(model, name, fleet.nn.SparseEmbedding(4, "t", optimizer=fleet.optim.FTRL(lr=rate)))
    with pytest.raises(ModelError, match=naming("'t'", "optimizer")):
        jobs.one_worker(model).__enter__()
    model.b.optimizer = fleet.optim.FTRL(lr=0.1)  # equal, and another object
    with jobs.one_worker(model):
        torch.optim.lr_scheduler.StepLR(model.b.optimizer, 1, 0.5).step()
        assert model.a.optimizer.param_groups[0]["lr"] == 0.05  # a scheduler of either acts on the table


def test_a_wrong_setting_of_a_group_names_the_table() -> None:
    def make(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": model.parameters(), "row_rule": "ftrl", "row_weight_decay": 0.1}], lr=0.1)

    with pytest.raises(ModelError, match=naming("'ids'", "weight_decay", "'l2'")):
        jobs.one_worker(Layers(state="none"), make).__enter__()


@each_of("name", ["Adam", "SparseAdam"])
@each_of("mode", ["sum", "max"])
def test_adam_on_rows_is_sparse_adam(mode: str, name: str) -> None:
    """Its place of eps, and no update of rows without a gradient: with max pooling those that are no maximum."""
    torch.manual_seed(0)
    layer = torch.nn.EmbeddingBag(12, 1, mode=mode, sparse=True)
    weight = torch.nn.Parameter(layer.weight.detach().clone())
    plain = torch.optim.SparseAdam([weight], lr=0.1, eps=0.1)
    with jobs.one_worker(
        torch.nn.Sequential(layer), lambda m: getattr(torch.optim, name)(list(m.parameters()), lr=0.1, eps=0.1)
    ) as part:
        for ids in torch.randint(0, 12, (6, 4, 3)):
            part.model(ids).sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            out = torch.nn.functional.embedding_bag(ids, weight, mode=mode)
            (gradient,) = torch.autograd.grad(out.sum(), weight)
            touched = gradient.any(dim=1).nonzero()[:, 0]
            weight.grad = torch.sparse_coo_tensor(touched[None], gradient[touched], weight.shape)
            plain.step()
        torch.testing.assert_close(part.rows("0", range(12)), weight.detach())
