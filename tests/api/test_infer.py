"""Prediction from a saved model: the training job's own scores, in a plain process; and with tables on servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.extras import Late
from support.grids import first_of
from support.messages import naming
from support.paths import SCRIPTS
from support.scripts.resuming import NUM_ITEMS, Model, batch_of, make_optimizer, train

import torchfleet as fleet
from torchfleet import nn
from torchfleet.api import current_job, infer
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.role.role_info import SERVER, RoleInfo

safetensors = Late("safetensors.numpy")

pytestmark = pytest.mark.xdist_group("inference_model")  # its fixtures are made once

SCRIPT = str(SCRIPTS / "plain_prediction.py")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "PSERVER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with jobs.clean_facade():
        yield


def scores_of(model: torch.nn.Module) -> torch.Tensor:
    """Of ids that were seen in training, and of some that were not."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(batch_of(0, step)) for step in range(6)])


def trained(folder: str, num_servers: int = 1, make: Callable[[], torch.nn.Module] = Model) -> torch.Tensor:
    """Train, save in both ways (FOLDER/full, FOLDER/small); returns the job's scores."""

    def body(part: jobs.Part) -> torch.Tensor:
        train(part.model, part.optimizer, 0, 0, 4)
        part.worker.save(f"{folder}/full", "full")
        part.worker.save(f"{folder}/small", "inference")
        return scores_of(part.model)

    done = jobs.run(body, make, lambda model: make_optimizer("adam", model), num_servers=num_servers)
    return done.results[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.Tensor]:
    """A model saved by two servers, and the scores of its job."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, trained(folder, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_servers", first_of([2, 1, 3]))
@pytest.mark.parametrize("kind", ["full", "small"])
def test_scores_are_those_of_the_training_job(kind: str, num_servers: int, tmp_path: Path) -> None:
    expected = trained(str(tmp_path), num_servers)
    torch.manual_seed(99)
    model = fleet.load_inference_model(str(tmp_path / kind), Model())
    assert not model.training
    assert torch.equal(scores_of(model), expected)


def test_bags_padding_and_every_kind_of_lookup_come_back(tmp_path: Path) -> None:
    batches = jobs.worker_batches(0, 6)

    def body(part: jobs.Part) -> list[torch.Tensor]:
        for batch in batches[:3]:
            part.step(batch)
        part.worker.save(str(tmp_path / "model"), "inference")
        part.model.eval()
        with torch.no_grad():
            return [part.model(batch) for batch in batches]

    expected = jobs.run(body, jobs.Net, jobs.fleet_optimizer("adagrad", lr=0.1), num_servers=2).results[0]
    model = fleet.load_inference_model(str(tmp_path / "model"), jobs.Net())
    with torch.no_grad():
        for batch, scores in zip(batches, expected, strict=True):
            assert torch.equal(model(batch), scores)


@pytest.mark.slow
def test_it_works_in_a_plain_process(saved: tuple[str, torch.Tensor]) -> None:
    output = jobs.command([SCRIPT, f"{saved[0]}/small"], 200)
    bits = bytes.fromhex(next(line for line in output.splitlines() if line.startswith("scores ")).split()[1])
    assert np.array_equal(np.frombuffer(bits, np.float32), saved[1][:16].numpy())


def tables_of(model: torch.nn.Module) -> dict[str, Any]:
    """The tables that its embeddings look into."""
    module = next(module for module in model.modules() if isinstance(module, nn.SparseEmbedding))
    for holder in vars(module._engine).values():
        if isinstance(holder, infer.LocalTables):
            return dict(holder._tables)
    raise AssertionError("no local tables")


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_ids_never_seen_read_as_zeros_and_get_no_row(mode: str, saved: tuple[str, torch.Tensor]) -> None:
    model = fleet.load_inference_model(f"{saved[0]}/full", Model())
    getattr(model, mode)()
    before = {name: table.stats()["rows"] for name, table in tables_of(model).items()}
    unseen = torch.tensor([-1, 2**62, 7, 123_456_789, -(2**63)])
    assert torch.equal(model.words(unseen), torch.zeros(5, 3))
    assert {name: table.stats()["rows"] for name, table in tables_of(model).items()} == before
    assert before["items"] == NUM_ITEMS


def test_ids_beyond_a_declared_size_are_an_error(saved: tuple[str, torch.Tensor]) -> None:
    model = fleet.load_inference_model(f"{saved[0]}/full", Model())
    with pytest.raises(FleetError, match=naming("'items'", 0, 39, 40)):
        model.items(torch.tensor([40]))
    with pytest.raises(FleetError, match=naming("-3", 1)):
        model.items(torch.tensor([1, -3, 99]))


def test_a_save_for_prediction_holds_no_state_and_is_smaller(saved: tuple[str, torch.Tensor]) -> None:
    """A third of the size with Adam; here keys and headers, which both have, count for more."""

    def sizes(kind: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in Path(saved[0], kind).rglob("*.safetensors"):
            table = path.name.split("-")[0]
            found[table] = found.get(table, 0) + path.stat().st_size
        return found

    full, small = sizes("full"), sizes("small")
    assert small.keys() == full.keys()
    for table in ("items", "words", "dense.0"):
        assert small[table] < 0.75 * full[table], table
    for path in Path(saved[0], "small").rglob("words*.safetensors"):
        assert safetensors.load_file(path)["rows"].shape[1] == 3
    for path in Path(saved[0], "full").rglob("words*.safetensors"):
        assert safetensors.load_file(path)["rows"].shape[1] == 9


class Deeper(Model):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(5, 5)


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(7, 6)


class Other(Model):
    def __init__(self, **modules: torch.nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


WRONG: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "missing parameters": (Deeper, "more.bias more.weight hidden.weight"),
    "a shape": (Wider, "hidden"),
    "dim": (lambda: Other(words=nn.SparseEmbedding(4, name="words")), "'words' dim=3 dim=4"),
    "a table": (
        lambda: Other(words=nn.SparseEmbedding(3, name="wrods")),
        "'wrods' words",
    ),
    "kind": (lambda: Other(items=nn.SparseEmbedding(4, name="items")), "'items' kind=array"),
    "size": (lambda: Other(items=torch.nn.Embedding(39, 4, sparse=True)), "'items' size=40"),
    "a buffer": (lambda: Other(norm=torch.nn.BatchNorm1d(8)), "(7,)"),
}


@pytest.mark.parametrize(("make", "text"), WRONG.values(), ids=WRONG.keys())
def test_a_model_that_differs_is_refused_and_the_difference_named(
    make: Callable[[], torch.nn.Module], text: str, saved: tuple[str, torch.Tensor]
) -> None:
    with pytest.raises(CheckpointError, match=naming(*text.split())):
        fleet.load_inference_model(f"{saved[0]}/full", make())


def test_parameters_of_equal_size_go_by_name_not_by_place(tmp_path: Path) -> None:
    """Two layers of one shape, held in another order."""

    def make(order: str) -> torch.nn.Module:
        model = torch.nn.Module()
        for name in order:
            setattr(model, name, torch.nn.Linear(3, 3))
        return model

    with jobs.one_worker(make("ab")) as part:
        part.worker.save(str(tmp_path), "inference")
    found = fleet.load_inference_model(str(tmp_path), make("ba"))
    for name, value in part.model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


def test_scalars_frozen_and_tied_parameters_come_back(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.randn(()))
            self.one = torch.nn.Linear(3, 3)
            self.two = torch.nn.Linear(3, 3)
            self.two.weight = self.one.weight
            self.frozen = torch.nn.Parameter(torch.randn(2, 2), requires_grad=False)

    with jobs.one_worker(Odd()) as part:
        part.worker.save(str(tmp_path), "full")
    found = fleet.load_inference_model(str(tmp_path), Odd())
    assert found.one.weight is found.two.weight
    for name, value in part.model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    trained(str(tmp_path))
    for pattern in ("words*", "items*", "dense.0*"):
        (path,) = (tmp_path / "small").rglob(pattern)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=naming(path.name)):
            fleet.load_inference_model(str(tmp_path / "small"), Model())
        path.unlink()
        with pytest.raises(CheckpointError, match=naming(path.name)):
            fleet.load_inference_model(str(tmp_path / "small"), Model())
        path.write_bytes(whole)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=naming(tmp_path)):
        fleet.load_inference_model(str(tmp_path), Model())
    assert os.listdir(tmp_path) == []


# With the tables left on the servers


def test_a_job_of_its_own_predicts_from_a_folder(saved: tuple[str, torch.Tensor]) -> None:
    for kind in ("full", "small"):
        with jobs.clean_facade():
            fleet.init()
            model = Model()
            predictor = fleet.DistributedInfer(model)
            predictor.init_distributed_infer_env(dirname=f"{saved[0]}/{kind}")
            found = torch.cat([predictor.predict(batch_of(0, step)) for step in range(6)])
            rows = current_job.get_worker().client.stats()[0]["tables"]["words"]["rows"]
            predictor.predict({"items": torch.tensor([1, 2]), "words": torch.tensor([-77, -78])})
            assert current_job.get_worker().client.stats()[0]["tables"]["words"]["rows"] == rows
            fleet.stop_worker()
        assert torch.equal(found, saved[1])


def test_servers_of_a_prediction_job_load_what_a_training_job_saved(saved: tuple[str, torch.Tensor]) -> None:
    """Their tables are made from the model alone, without its optimizer."""
    places = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    num_rows = 0
    for index in range(3):
        with jobs.clean_facade():
            fleet.init(fleet.UserDefinedRoleMaker(index, "server", 1, list(places)))
            job = current_job.get_job()
            fleet.distributed_model(Model())
            job.distribute_for_prediction()
            server = jobs.loaded_server(job, f"{saved[0]}/full")
            num_rows += sum(
                table.stats()["rows"] for table in server.state.tables.values() if table.spec.name == "words"
            )
    whole = fleet.load_inference_model(f"{saved[0]}/full", Model())
    assert num_rows == tables_of(whole)["words"].stats()["rows"]


def test_straight_after_training_it_predicts_in_the_same_job() -> None:
    torch.manual_seed(0)
    fleet.init()
    model = fleet.distributed_model(Model())
    optimizer = fleet.distributed_optimizer(make_optimizer("adam", model), jobs.strategy("async"))
    fleet.init_worker()
    train(model, optimizer, 0, 0, 3)
    predictor = fleet.DistributedInfer(model)
    predictor.init_distributed_infer_env()
    before = current_job.get_worker().client.stats()[0]["tables"]
    found = predictor.predict(batch_of(0, 1))
    assert not found.requires_grad
    after = current_job.get_worker().client.stats()[0]["tables"]
    assert {name: (t["rows"], t["step"]) for name, t in after.items()} == {
        name: (t["rows"], t["step"]) for name, t in before.items()
    }
    fleet.stop_worker()


def test_predicting_without_a_folder_or_with_one_too_many_is_refused(saved: tuple[str, torch.Tensor]) -> None:
    fleet.init()
    with pytest.raises(FleetError, match="model"):
        fleet.DistributedInfer(Model()).init_distributed_infer_env()
    current_job.current.job = None
    fleet.init()
    model = fleet.distributed_model(Model())
    fleet.distributed_optimizer(make_optimizer("adam", model))
    fleet.init_worker()
    with pytest.raises(FleetError, match="dirname"):
        fleet.DistributedInfer(model).init_distributed_infer_env(dirname=f"{saved[0]}/full")
    fleet.stop_worker()


def test_a_server_job_of_training_reads_a_save_for_prediction(saved: tuple[str, torch.Tensor]) -> None:
    """Values as saved; optimizer state, which it does not have, starts anew, and with it the count of steps."""
    info = RoleInfo(SERVER, 0, 1, 0, ("127.0.0.1:1",))
    job = jobs.make_part(Model, lambda m: make_optimizer("adam", m), jobs.strategy(), info).job
    server = jobs.loaded_server(job, f"{saved[0]}/small")
    model = fleet.load_inference_model(f"{saved[0]}/small", Model())
    for table in server.state.tables.values():
        if table.spec.kind != "dense":
            keys, rows, _ = next(table.chunks())
            assert np.array_equal(rows[:, : table.spec.dim], tables_of(model)[table.spec.name].pull(keys, create=False))
            assert not rows[:, table.spec.dim :].any()
        assert table.step == 0
