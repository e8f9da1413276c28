"""Tensors of a model that are not float32, or that training replaces: sent to all workers, saved, loaded, compared."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import jobs
from support.messages import naming
from support.paths import SUPPORT
from support.recorded_model import STEPS, batch_of
from support.recorded_model import Model as RecordedModel

import torchfleet as fleet
from torchfleet.api.job.server_role import ServerRole
from torchfleet.base.errors import CheckpointError, ModelError
from torchfleet.base.role.role_info import SERVER, RoleInfo
from torchfleet.observe.commands.command import main as fleet_command
from torchfleet.ps.checkpoint.compaction import compact
from torchfleet.ps.checkpoint.comparison import compare

RECORDED = SUPPORT / "recorded"


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    with jobs.clean_facade():
        yield


class Model(torch.nn.Module):
    """Batch norm (int64 counter), buffers of several types, a frozen bfloat16 layer, a buffer that is replaced."""

    def __init__(self, salt: float = 0.0) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.out = torch.nn.Linear(3, 1)
        self.frozen = torch.nn.Linear(3, 2, dtype=torch.bfloat16).requires_grad_(False)
        noise = torch.randn(3, 5, dtype=torch.float64) + salt
        self.register_buffer("table", noise)
        self.register_buffer("mask", noise[0] > 0)  # five bytes: no whole number of words
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("phase", torch.view_as_complex(torch.randn(2, 2)))
        self.register_buffer("nothing", torch.empty(0, dtype=torch.int64))
        self.register_buffer("extremes", torch.tensor([-(2**63), 2**63 - 1, -1]))
        self.register_buffer("infinite", torch.tensor([float("nan"), float("-inf")], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps = self.steps + 1  # another tensor in its place, as many models do
            self.total = self.total + x.sum()
        return self.out(self.norm(x)).squeeze(1)


def batch(worker: int, step: int) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * worker + step))


def train(part: jobs.Part, num_steps: int = 3) -> None:
    for step in range(num_steps):
        part.model(batch(part.index, step)).square().mean().backward()
        part.optimizer.step()
        part.optimizer.zero_grad()


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def saved_by_two_workers(folder: str, kind: str = "full", num_servers: int = 1) -> list[dict[str, torch.Tensor]]:
    """Train on two workers, save; returns what each worker's model held when worker 0 saved."""

    def body(part: jobs.Part) -> dict[str, torch.Tensor]:
        train(part)
        if part.index == 0:
            part.worker.save(folder, kind)
        return copied(part.model)

    return jobs.run(body, Model, jobs.sgd, num_workers=2, num_servers=num_servers).results


def test_every_tensor_of_worker_0_reaches_every_worker_at_the_start() -> None:
    first = jobs.run(lambda part: copied(part.model), Model, jobs.sgd, num_workers=3, num_servers=2).results
    torch.manual_seed(0)  # as worker 0's model was made
    expected = copied(Model())
    for found in first:
        assert_same_bits(found, expected)


def test_they_arrive_without_the_barrier_at_the_start_too() -> None:
    found = jobs.run(
        lambda part: copied(part.model),
        Model,
        jobs.sgd,
        mode="half_async",
        num_workers=2,
        delays=[0.2, 0.0],
        launch_barrier=False,
    ).results
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("kind", ["full", "inference"])
def test_what_worker_0_holds_when_it_saves_comes_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    """Counters and running means as they are now: not their first values, and not another worker's."""
    states = saved_by_two_workers(str(tmp_path), kind, num_servers=2)
    assert states[0]["norm.num_batches_tracked"] == 3
    assert states[0]["steps"] == 3
    assert not torch.equal(states[0]["total"], states[1]["total"])
    found = fleet.load_inference_model(str(tmp_path), Model(salt=7.0))
    assert_same_bits(copied(found), states[0])


@pytest.mark.parametrize("num_servers", [1, 3])
def test_another_number_of_servers_gives_them_to_all_workers_of_the_next_job(num_servers: int, tmp_path: Path) -> None:
    expected = saved_by_two_workers(str(tmp_path), num_servers=2)[0]

    servers = jobs.Servers(0, 2)
    places = tuple(f"127.0.0.1:{port}" for port in range(1, num_servers + 1))
    for index in range(num_servers):
        job = jobs.make_part(Model, jobs.sgd, jobs.strategy(), RoleInfo(SERVER, 0, 2, index, places)).job
        role = ServerRole(job)
        role.load(str(tmp_path))
        servers.servers.append(role._server)
    servers._transports = [jobs.GatedTransport(server) for server in servers.servers]
    found = jobs.run(lambda part: copied(part.model), lambda: Model(3.0), jobs.sgd, num_workers=2, servers=servers)
    for state in found.results:
        assert_same_bits(state, expected)


def test_a_prediction_job_and_one_process_load_them(tmp_path: Path) -> None:
    expected = saved_by_two_workers(str(tmp_path))[0]
    fleet.init()
    model = Model(5.0)
    fleet.DistributedInfer(model).init_distributed_infer_env(dirname=str(tmp_path))
    assert_same_bits(copied(model), expected)
    fleet.stop_worker()
    fleet.init()
    model = fleet.distributed_model(Model(5.0))
    fleet.distributed_optimizer(jobs.sgd(model))
    fleet.init_worker(str(tmp_path))
    assert_same_bits(copied(model), expected)
    fleet.stop_worker()


def test_deltas_compaction_inspection_and_comparison_know_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = str(tmp_path / "model"), str(tmp_path / "other")
    with jobs.one_worker(Model()) as part:
        part.worker.save(other, "full")
        part.worker.save(model, "full")
        train(part)
        part.worker.save(model, "delta")
        expected = copied(part.model)
    compact(model)
    assert_same_bits(copied(fleet.load_inference_model(model, Model())), expected)
    found = compare(other, model)
    assert (found.parameters["steps"].changed, found.parameters["steps"].largest) == (1, 3.0)
    assert (found.parameters["table"].equal, found.parameters["table"].changed) == (15, 0)
    assert (found.parameters["frozen.weight"].equal, found.parameters["mask"].equal) == (6, 5)
    assert compare(model, model).is_equal
    assert fleet_command(["inspect", model, "--check"]) == 0
    assert "dense.bytes" in capsys.readouterr().out


def test_a_delta_goes_on_from_a_recorded_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / "model", tmp_path / "model")
    folder = str(tmp_path / "model")
    fleet.init()
    model = fleet.distributed_model(RecordedModel())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    fleet.init_worker(folder)
    *inputs, target = batch_of(0)
    (model(*inputs) - target).square().mean().backward()
    optimizer.step()
    fleet.save_persistables(folder, mode=1)
    fleet.stop_worker()
    found = fleet.load_inference_model(folder, RecordedModel())
    assert found.norm.num_batches_tracked == model.norm.num_batches_tracked == STEPS + 1


class Float(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = self.table.float()


class Shorter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.mask = self.mask[:4]


class More(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("more", torch.tensor(1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Float, "'table' float64 float32 (3, 5)"),
        (Shorter, "'mask' bool (5,) (4,)"),
        (More, "more"),
    ],
)
def test_a_tensor_of_another_type_or_shape_is_refused_by_name(make: type[Model], text: str, tmp_path: Path) -> None:
    with jobs.one_worker(Model()) as part:
        part.worker.save(str(tmp_path), "full")
    with pytest.raises(CheckpointError, match=naming(*text.split())):
        fleet.load_inference_model(str(tmp_path), make())
    job = jobs.make_part(make, jobs.sgd, jobs.strategy(), RoleInfo(SERVER, 0, 1, 0, ("127.0.0.1:1",))).job
    with pytest.raises(CheckpointError, match=naming(*text.split())):
        ServerRole(job).load(str(tmp_path))


class WithState(torch.nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(2)

    def set_extra_state(self, state: torch.Tensor) -> None: ...


def sparse_buffer() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    model.register_buffer("links", torch.eye(3).to_sparse())
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.nn.Sequential(WithState(2, 1)), "'0._extra_state' register_buffer"),
        (sparse_buffer, "'links'"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(make: type[torch.nn.Module], text: str) -> None:
    with pytest.raises(ModelError, match=naming(*text.split())):
        jobs.make_part(make, jobs.sgd, jobs.strategy(), jobs.roles(1, 1)[0])


def test_a_buffer_that_became_another_kind_of_tensor_is_named_when_it_is_saved(tmp_path: Path) -> None:
    with jobs.one_worker(Model()) as part:
        part.model.steps = torch.zeros(2)
        with pytest.raises(ModelError, match=naming("'steps'", "int64", "float32", "(2,)")):
            part.worker.save(str(tmp_path), "full")
        part.model.steps = torch.tensor(1)
        part.model.total = torch.tensor([1.0, float("nan")])
        with pytest.raises(ModelError, match=naming("'total'", "NaN")):
            part.worker.save(str(tmp_path), "full")
