"""optimizer.state_dict() and load_state_dict(), as every torch script saves and resumes: the same numbers as without an
interruption, and as in plain torch, in every mode; or an error that says how to save."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.messages import naming

import torchfleet as fleet
from torchfleet import nn, optim
from torchfleet.api import current_job
from torchfleet.base.errors import FleetError, ModelError, TableError
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

NUM_IDS = 12
Make = Callable[[torch.nn.Module], Any]


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    with jobs.clean_facade():
        yield


class Net(torch.nn.Module):
    """Two lookups in one table, a tower, a parameter that takes no part in the loss."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.out = torch.nn.Linear(6, 1)
        self.ids = torch.nn.Embedding(NUM_IDS, 3, sparse=sparse)
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first, second = self.ids(ids), self.ids(ids.flip(0))
        return self.out(torch.cat([first * self.scale, torch.tanh(second)], dim=1)).squeeze(1)


RULES: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "dampened": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda model: torch.optim.Adagrad(
        model.parameters(), lr=0.3, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-12),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-12, weight_decay=0.0),
    "sparse_adam": lambda model: [
        torch.optim.SparseAdam([model.ids.weight], lr=0.05),
        torch.optim.Adam([*model.out.parameters(), model.scale], lr=0.05),
    ],
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True),
    "rowwise_adagrad": lambda model: optim.RowWiseAdagrad(model.parameters(), lr=0.1),
    "rowwise_momentum": lambda model: optim.RowWiseAdagrad(model.parameters(), lr=0.1, momentum=0.5),
    "ftrl": lambda model: optim.FTRL(model.parameters(), lr=0.1, l1=0.01),
    "lion": lambda model: optim.Lion(model.parameters(), lr=0.01),
}
# torch itself does not take sparse gradients of these, so plain torch has dense ones, and every id in every batch
DENSE_IN_TORCH = {"momentum", "dampened", "adam", "adamw", "rmsprop"}


def step(model: torch.nn.Module, optimizers: list[Any], number: int, every_id: bool = False) -> float:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randperm(NUM_IDS, generator=generator) if every_id else torch.randint(8, (6,), generator=generator)
    loss = (model(ids) - torch.sin(ids.float())).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if fleet_is_async():
        fleet.flush()  # else the staleness of the next step is a matter of chance
    return loss.item()


def fleet_is_async() -> bool:
    job = current_job.current.job
    return job is not None and job.is_under_way and job.mode == "async"


def several(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


def begin(
    make: Make, mode: str = "sync", seed: int = 0, make_model: Any = Net, dirname: str | None = None
) -> tuple[Any, list[Any]]:
    """A job in one process, whose first values follow from the seed."""
    fleet.init()
    torch.manual_seed(seed)
    model = fleet.distributed_model(make_model(), jobs.strategy(mode))
    optimizers = several(fleet.distributed_optimizer(make(model)))
    fleet.init_worker(dirname)
    return model, optimizers


def through_a_file(model: Any, optimizers: list[Any]) -> Any:
    """What plain torch reads back."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(saved: Any, model: Any, optimizers: list[Any]) -> None:
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)


CASES = [
    *(("sync", rule) for rule in RULES),
    *((mode, rule) for mode in ("half_async", "async", "hybrid") for rule in ("momentum", "adagrad", "adam")),
    *(("geo", rule) for rule in ("sgd", "momentum", "dampened")),
    ("async", "sparse_adam"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rule"), CASES)
def test_a_script_goes_on_as_if_it_had_not_been_interrupted(mode: str, rule: str) -> None:
    model, optimizers = begin(RULES[rule], mode)
    for number in range(3):
        step(model, optimizers, number)
    saved = through_a_file(model, optimizers)
    expected = [step(model, optimizers, number) for number in range(3, 7)]
    at_the_end = {name: value.clone() for name, value in model.state_dict().items()}
    fleet.stop_worker()
    for is_model_first in (True, False):
        model, optimizers = begin(RULES[rule], mode, seed=9)
        if is_model_first:
            step(model, optimizers, 50)  # what was there before is replaced
        order = load if is_model_first else load_in_the_other_order
        order(copy.deepcopy(saved), model, optimizers)  # as in torch, an optimizer trains on in what it has loaded
        found = [step(model, optimizers, number) for number in range(3, 7)]
        tolerance = 1e-6 if mode == "geo" else 0  # differences are added, and sums rounded
        assert found == pytest.approx(expected, rel=tolerance, abs=0)
        for name, value in model.state_dict().items():
            assert torch.allclose(value, at_the_end[name], rtol=tolerance, atol=tolerance), name
        fleet.stop_worker()


def load_in_the_other_order(saved: Any, model: Any, optimizers: list[Any]) -> None:
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    model.load_state_dict(saved["model"])


def plain(rule: str, seed: int) -> tuple[torch.nn.Module, list[Any]]:
    torch.manual_seed(seed)
    model = Net(sparse=rule not in DENSE_IN_TORCH)
    return model, several(RULES[rule](model))


@pytest.mark.parametrize("rule", RULES)
def test_plain_torch_goes_on_from_the_file_and_a_fleet_from_plain_torchs(rule: str) -> None:
    oracle = plain(rule, 0)
    for number in range(3):
        step(*oracle, number, every_id=True)
    of_torch = through_a_file(*oracle)
    of_torch_later = [step(*oracle, number, every_id=True) for number in range(3, 6)]
    model, optimizers = begin(RULES[rule], seed=9)
    load(of_torch, model, optimizers)
    of_fleet = through_a_file(model, optimizers)
    for ours, theirs in zip(of_fleet["optimizers"], of_torch["optimizers"], strict=True):
        assert list(ours["state"]) == list(theirs["state"])
        assert [group["params"] for group in ours["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
        for number, state in theirs["state"].items():
            given = {name: value for name, value in state.items() if value is not None}
            assert sorted(ours["state"][number]) == sorted(given), number
            for name, value in given.items():
                found = ours["state"][number][name]
                assert type(found) is type(value), name
                assert np.array_equal(np.asarray(found), np.asarray(value)), (number, name)
    assert [step(model, optimizers, number, every_id=True) for number in range(3, 6)] == pytest.approx(
        of_torch_later, rel=1e-5
    )
    fleet.stop_worker()
    again = plain(rule, 7)
    load(of_fleet, *again)
    assert [step(*again, number, every_id=True) for number in range(3, 6)] == pytest.approx(of_torch_later, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rule"), [("sync", "adagrad"), ("geo", "momentum"), ("hybrid", "momentum")])
def test_a_state_that_is_loaded_before_init_worker_is_the_first_one(mode: str, rule: str) -> None:
    model, optimizers = begin(RULES[rule], mode)
    for number in range(3):
        step(model, optimizers, number)
    saved = through_a_file(model, optimizers)
    expected = [step(model, optimizers, number) for number in range(3, 6)]
    fleet.stop_worker()
    for is_converted in (True, False):
        fleet.init()
        model = fleet.distributed_model(Net(), jobs.strategy(mode))
        made, state = RULES[rule](model), copy.deepcopy(saved["optimizers"][0])
        if not is_converted and mode != "hybrid":
            made.load_state_dict(state)
        optimizer = fleet.distributed_optimizer(made)
        if is_converted or mode == "hybrid":
            optimizer.load_state_dict(state)
        model.load_state_dict(saved["model"])
        fleet.init_worker()
        assert [step(model, [optimizer], number) for number in range(3, 6)] == pytest.approx(expected, rel=1e-6)
        fleet.stop_worker()


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_worker_0s_state_counts_and_all_workers_go_on_from_it(mode: str) -> None:
    """Two workers on two servers; worker 1 has loaded another file."""
    rule = "momentum" if mode == "geo" else "adagrad"
    files: dict[int, Any] = {}
    for seed in (0, 1):
        model, optimizers = begin(RULES[rule], seed=seed)
        for number in range(3):
            step(model, optimizers, 10 * seed + number)
        files[seed] = through_a_file(model, optimizers)
        fleet.stop_worker()

    def body(part: jobs.Part) -> Any:
        load(files[part.index], part.model, [part.optimizer])
        part.barrier()
        return through_a_file(part.model, [part.optimizer])

    found = jobs.run(body, Net, RULES[rule], mode=mode, num_workers=2, num_servers=2)
    expected = files[0]["optimizers"][0]["state"]
    chosen = found.results if mode != "geo" else found.results[:1]  # a geo worker's velocities are its own
    for result in chosen:
        for number, state in expected.items():
            for name, value in state.items():
                assert torch.equal(result["optimizers"][0]["state"][number][name], value), (number, name)


@pytest.mark.parametrize("rule", ["momentum", "dampened"])
def test_a_save_in_geo_keeps_the_velocities(rule: str, tmp_path: Path) -> None:
    model, optimizers = begin(RULES[rule], "geo")
    for number in range(3):
        step(model, optimizers, number)
    fleet.save_persistables(str(tmp_path))
    expected = [step(model, optimizers, number) for number in range(3, 7)]
    fleet.stop_worker()
    for dirname in (str(tmp_path), None):
        model, optimizers = begin(RULES[rule], "geo", dirname=dirname)
        found = [step(model, optimizers, number) for number in range(3, 7)]
        fleet.stop_worker()
        assert (found == pytest.approx(expected, rel=1e-6)) == (dirname is not None)


# What cannot be had


def test_a_table_for_any_id_names_what_saves_it() -> None:
    def words() -> torch.nn.Module:
        return torch.nn.Sequential(nn.SparseEmbedding(3, name="words"), torch.nn.Linear(3, 1))

    model, (optimizer,) = begin(RULES["adagrad"], make_model=words)
    with pytest.raises(ModelError, match=naming("'words'", "fleet.save_persistables", "state='rows'")):
        optimizer.state_dict()
    model[0].state = "none"
    assert list(optimizer.state_dict()["state"]) == [1, 2]
    fleet.stop_worker()
    _, (optimizer,) = begin(RULES["sgd"], make_model=words)  # no state to lose
    assert optimizer.state_dict()["state"] == {}
    fleet.stop_worker()


def test_ids_and_their_state_go_together() -> None:
    def words() -> torch.nn.Module:
        return torch.nn.Sequential(nn.SparseEmbedding(3, name="words", state="rows"), torch.nn.Linear(3, 1))

    def train(model: Any, optimizer: Any, ids: list[int]) -> float:
        loss = model(torch.tensor(ids)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    model, optimizers = begin(RULES["adam"], make_model=words)
    for ids in ([5, -7], [2**40, 5]):
        train(model, optimizers[0], ids)
    saved = through_a_file(model, optimizers)
    assert saved["optimizers"][0]["state"][0]["keys"].tolist() == [-7, 5, 2**40]
    expected = [train(model, optimizers[0], ids) for ids in ([-7, 2**40], [5, 8])]
    fleet.stop_worker()
    model, optimizers = begin(RULES["adam"], make_model=words)
    train(model, optimizers[0], [5, 99])
    load(saved, model, optimizers)
    assert [train(model, optimizers[0], ids) for ids in ([-7, 2**40], [5, 8])] == expected
    fleet.stop_worker()


def test_a_state_of_another_kind_or_shape_is_refused_and_changes_nothing() -> None:
    model, optimizers = begin(RULES["adam"])
    step(model, optimizers, 0)
    before = through_a_file(model, optimizers)["optimizers"][0]
    other, sgd = torch.nn.Linear(2, 1), {**before, "state": {0: {"momentum_buffer": torch.zeros(1, 6)}}}
    for wrong, expected in [
        (sgd, ["momentum_buffer", "exp_avg"]),
        ({**before, "state": {3: {**before["state"][3], "exp_avg": torch.zeros(3, 3)}}}, ["(12, 3)", "(3, 3)"]),
        ({**before, "state": {0: {**before["state"][0], "exp_avg": torch.full((1, 6), torch.nan)}}}, ["NaN"]),
    ]:
        with pytest.raises(ModelError, match=naming(*expected)):
            optimizers[0].load_state_dict(wrong)
    with pytest.raises(ValueError, match="parameter group"):  # as torch has it
        optimizers[0].load_state_dict(torch.optim.Adam(other.parameters()).state_dict())
    after = through_a_file(model, optimizers)["optimizers"][0]
    for number, state in before["state"].items():
        assert all(torch.equal(value, after["state"][number][name]) for name, value in state.items())
    fleet.stop_worker()
    with pytest.raises(FleetError, match=naming("fleet.stop_worker")):
        optimizers[0].state_dict()


# On the servers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_state_alone_leaves_values_and_makes_no_row(dtype: str) -> None:
    spec = TableSpec("t", dim=2, rule=Rule("adam", lr=0.1), format=RowFormat(dtype))
    server = Server(max_table_bytes=1 << 22)
    client = Client([jobs.InProcess(server).connect()])
    client.create_table(spec)
    keys = np.arange(5, dtype=np.uint64)
    client.push("t", keys, np.ones((5, 2), np.float32)).result()
    values = client.pull("t", keys).result()
    states = np.arange(24, dtype=np.float32).reshape(6, 4)
    client.assign_states("t", np.arange(6, dtype=np.uint64), states, step=7)
    assert np.array_equal(client.pull("t", keys).result(), values)
    (found,) = [(some.copy(), rows.copy(), number) for some, rows, number in client.walk_rows(spec)]
    order = np.argsort(found[0])
    assert found[0][order].tolist() == list(range(5))
    assert found[2] == 7
    assert np.array_equal(found[1][order], np.concatenate([values, states[:5]], axis=1))


def test_state_alone_of_a_network_leaves_its_values() -> None:
    client = Client([jobs.InProcess(Server(max_table_bytes=1 << 22)).connect() for _ in range(2)])
    spec = TableSpec("d", "dense", size=5, rule=Rule("adam", lr=0.1), num_shards=2)
    client.create_table(spec)
    client.set_dense("d", np.arange(5, dtype=np.float32))
    states = np.arange(10, dtype=np.float32).reshape(2, 5)
    client.set_block_state("d", states, step=3)
    block, step = client.pull_block("d")
    assert step == 3
    assert np.array_equal(block, np.concatenate([np.arange(5, dtype=np.float32)[None], states]))
    with pytest.raises(TableError, match=naming("negative")):
        client.set_block_state("d", -states - 1, step=4)
    assert np.array_equal(client.pull_block("d")[0], block)


def test_rows_in_a_cache_go_on_with_their_state() -> None:
    def cached() -> torch.nn.Module:
        return torch.nn.Sequential(nn.SparseEmbedding(3, name="ids", num_embeddings=NUM_IDS, cache="1MB"))

    def train(model: Any, optimizer: Any, number: int) -> float:
        loss = (model(torch.arange(number, number + 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizers = begin(RULES["adam"], make_model=cached)
    for number in range(3):
        train(model, optimizers[0], number)
    saved = through_a_file(model, optimizers)
    expected = [train(model, optimizers[0], number) for number in range(4)]
    load(copy.deepcopy(saved), model, optimizers)
    assert [train(model, optimizers[0], number) for number in range(4)] == expected
    fleet.stop_worker()
    model, optimizers = begin(RULES["adam"], make_model=cached, seed=9)
    load(saved, model, optimizers)
    assert [train(model, optimizers[0], number) for number in range(4)] == expected
    fleet.stop_worker()
