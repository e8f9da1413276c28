"""Training goes on from a saved model: exactly, on any number of servers, all of it or what is named; and mistakes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import jobs
from support.messages import lines_naming, names, naming
from support.paths import SCRIPTS
from support.scripts.resuming import NUM_ITEMS, Model, make_optimizer, train
from support.scripts.saved_models import contents

import torchfleet as fleet
from torchfleet import nn
from torchfleet.api import current_job
from torchfleet.api.job.worker_role import WorkerRole
from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.role.role_info import SERVER, RoleInfo
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import read_manifest
from torchfleet.ps.server.server import Server

SCRIPT = str(SCRIPTS / "resuming.py")
WORDS = np.arange(1000) * 1_000_003 - 5
Make = Callable[[], torch.nn.Module]


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "PSERVER_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with jobs.clean_facade():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "model")


class Loaded(jobs.Servers):
    """Servers in this process that have loaded a model, each as a process of its own does."""

    def __init__(
        self,
        make_model: Make,
        rule: str,
        num: int,
        num_workers: int = 1,
        dirname: str | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        places = tuple(f"127.0.0.1:{port}" for port in range(1, num + 1))
        self.servers = []
        for index in range(num):
            info = RoleInfo(SERVER, 0, num_workers, index, places)
            job = jobs.make_part(make_model, lambda m: make_optimizer(rule, m), jobs.strategy(), info).job
            self.servers.append(jobs.loaded_server(job, dirname, var_names))
        self._transports = [jobs.GatedTransport(server) for server in self.servers]


@contextlib.contextmanager
def local(
    make_model: Make,
    rule: str = "adam",
    dirname: str | None = None,
    var_names: Any = None,
    seed: int = 0,
    strategy: Any = None,
) -> Iterator[tuple[torch.nn.Module, Any]]:
    """A job in one process, from init to stop_worker."""
    torch.manual_seed(seed)
    with jobs.clean_facade():
        fleet.init()
        model = fleet.distributed_model(make_model())
        optimizer = fleet.distributed_optimizer(make_optimizer(rule, model), strategy)
        fleet.init_worker(dirname, var_names)
        yield model, optimizer
        fleet.stop_worker()


def save_local(folder: str, make_model: Make = Model, rule: str = "adam", num_steps: int = 3) -> dict[str, np.ndarray]:
    """Train and save; returns what was saved, by name."""
    with local(make_model, rule) as (model, optimizer):
        train(model, optimizer, 0, 0, num_steps)
        fleet.save_persistables(folder)
        return values(model)


def rows(table: str, keys: Any) -> np.ndarray:
    return current_job.get_worker().client.pull(table, keys, create=False).result()


def values(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Dense parameters, float buffers, and rows of both tables."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: value.detach().numpy().copy() for name, value in named.items() if value.dtype == torch.float32}
    found = {name: value for name, value in found.items() if value.size}
    return {**found, "items": rows("items", np.arange(NUM_ITEMS)), "words": rows("words", WORDS)}


def as_floats(servers: Sequence[Server]) -> dict[str, dict[int, np.ndarray]]:
    return {
        name: {key: np.frombuffer(row, np.float32) for key, row in found.items()}
        for name, found in contents(servers).items()
    }


def assert_close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, known in expected.items():
        assert found[name].keys() == known.keys(), name
        for key, row in known.items():
            assert np.allclose(found[name][key], row, rtol=tolerance, atol=tolerance), (name, key)


# Going on


@pytest.mark.parametrize("rule", ["adam", "adagrad", "sgd", "momentum"])
def test_an_interruption_changes_nothing(rule: str, folder: str) -> None:
    """Two epochs, against one that is saved by 2 servers, loaded by 3, and followed by another."""
    optimizer = lambda model: make_optimizer(rule, model)  # noqa: E731

    def whole(part: jobs.Part) -> None:
        train(part.model, part.optimizer, part.index, 0, 8)

    def first(part: jobs.Part) -> None:
        train(part.model, part.optimizer, part.index, 0, 4)
        part.barrier()
        if part.index == 0:
            part.worker.save(folder, "full")
        part.barrier()

    def second(part: jobs.Part) -> None:
        train(part.model, part.optimizer, part.index, 4, 8)

    expected = jobs.run(whole, Model, optimizer, num_workers=2, num_servers=2)
    jobs.run(first, Model, optimizer, num_workers=2, num_servers=2)
    servers = Loaded(Model, rule, 3, 2, folder)
    found = jobs.run(second, Model, optimizer, num_workers=2, servers=servers)
    wanted = as_floats(expected.servers.servers)
    seen = as_floats(servers.servers)
    for name in ("dense.fixed", "dense.bytes"):  # buffers live on workers
        wanted.pop(name)
        seen.pop(name)
    assert_close(seen, wanted)
    assert found.parts[0].model.norm.num_batches_tracked == 8
    for name in ("running_mean", "running_var"):
        assert torch.allclose(
            getattr(found.parts[0].model.norm, name), getattr(expected.parts[0].model.norm, name), atol=1e-6
        )
    for part in found.parts:
        for name, parameter in part.model.named_parameters():
            wanted = dict(expected.parts[0].model.named_parameters())[name]
            assert torch.allclose(parameter.detach(), wanted.detach(), atol=1e-6)


@pytest.mark.slow
def test_two_jobs_of_real_processes_equal_one(tmp_path: Path) -> None:
    def fleetrun(servers: int, *options: str) -> str:
        launcher = ["-m", "torchfleet.launch", "--log_dir", str(tmp_path / "log"), "--server_num", str(servers)]
        jobs.command([*launcher, "--worker_num", "2", SCRIPT, *options], 200)
        return "\n".join(path.read_text() for path in (tmp_path / "log").rglob("*") if path.is_file())

    half, full = str(tmp_path / "half"), str(tmp_path / "full")
    log = fleetrun(2, "--first", "0", "--last", "3", "--save", half)
    assert lines_naming(log, "fleet.save_persistables", "worker 0", "worker 1")
    fleetrun(3, "--first", "3", "--last", "6", "--load", half, "--save", full)

    def whole(part: jobs.Part) -> None:
        train(part.model, part.optimizer, part.index, 0, 6)
        part.barrier()
        if part.index == 0:
            part.worker.save(str(tmp_path / "expected"), "full")
        part.barrier()

    jobs.run(whole, Model, lambda model: make_optimizer("adam", model), num_workers=2)
    found = as_floats(Loaded(Model, "adam", 1, dirname=full).servers)
    expected = as_floats(Loaded(Model, "adam", 1, dirname=str(tmp_path / "expected")).servers)
    assert_close(found, expected)
    assert read_manifest(Storage(full)).num_servers == 3


def test_one_process_goes_on_from_where_it_was(folder: str) -> None:
    for rule in ("adam", "adagrad"):
        with local(Model, rule) as (model, optimizer):
            train(model, optimizer, 0, 0, 6)
            expected = values(model)
        saved = save_local(folder, rule=rule)
        with local(Model, rule, folder, seed=9) as (model, optimizer):
            assert {name: value.tolist() for name, value in values(model).items()} == {
                name: value.tolist() for name, value in saved.items()
            }
            train(model, optimizer, 0, 3, 6)
            found = values(model)
        for name, value in expected.items():
            assert np.allclose(found[name], value, rtol=1e-6, atol=1e-6), (rule, name)


@pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
def test_gradients_of_worker_0_are_applied_before_it_saves(mode: str, folder: str) -> None:
    with local(Model, "sgd", strategy=jobs.strategy(mode)) as (model, optimizer):
        train(model, optimizer, 0, 0, 5)
        fleet.save_persistables(folder)
        fleet.flush()
        items, words = rows("items", np.arange(NUM_ITEMS)), rows("words", WORDS)
    with local(Model, "sgd", folder, seed=9):
        assert np.array_equal(rows("items", np.arange(NUM_ITEMS)), items)
        assert np.array_equal(rows("words", WORDS), words)


# Parts of a model


def test_only_the_named_tables_are_loaded(folder: str) -> None:
    saved = save_local(folder)
    with local(Model, seed=9) as (model, _):
        fresh = values(model)
    with local(Model, dirname=folder, var_names=["items"], seed=9) as (model, _):
        found = values(model)
    assert np.array_equal(found["items"], saved["items"])
    assert not found["words"].any()
    for name in fresh.keys() - {"items", "words"}:
        assert np.array_equal(found[name], fresh[name]), name


def test_only_the_named_parameters_are_loaded(folder: str) -> None:
    saved = save_local(folder)
    with local(Model, seed=9) as (model, _):
        fresh = values(model)
    names = ["hidden.weight", "out.bias", "norm.running_mean"]
    with local(Model, dirname=folder, var_names=names, seed=9) as (model, _):
        found = values(model)
    for name in saved:
        assert np.array_equal(found[name], (saved if name in names else fresh)[name]), name


class Sums(torch.nn.Module):
    """The gradient of `left` is 1, that of `right` is the input, whatever their values."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.right) + self.left.sum()


@pytest.mark.parametrize("rule", ["adam", "adagrad"])
def test_named_parameters_are_loaded_with_their_optimizers_state(rule: str, folder: str) -> None:
    def step(model: Any, optimizer: Any, number: int) -> None:
        model(torch.tensor([1.0, 2.0, 3.0]).roll(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = Sums()
    oracle = make_optimizer(rule, plain)
    for number in range(3):
        step(plain, oracle, number)
    with local(Sums, rule) as (model, optimizer):
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        fleet.save_persistables(folder)
    for chosen in (["left"], ["right"], ["left", "right"]):
        with local(Sums, rule, folder, chosen) as (model, optimizer):
            step(model, optimizer, 2)
            for name in chosen:
                found, expected = getattr(model, name), getattr(plain, name)
                assert torch.allclose(found, expected, rtol=1e-6), (chosen, found, expected)


def test_named_parameters_of_another_rule_are_told_of(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with local(Sums, "adagrad"):
        fleet.save_persistables(folder)
    capsys.readouterr()
    with local(Sums, "adam", folder, ["left"]):
        assert lines_naming(capsys.readouterr().err, "dense.0", "adagrad", "adam")


def test_a_delta_does_not_follow_a_load_into_another_row_type(folder: str) -> None:
    def typed(dtype: str) -> Make:
        return lambda: torch.nn.Sequential(nn.SparseEmbedding(2, name="words", dtype=dtype))

    def step(model: Any, optimizer: Any, stop: int) -> None:
        model(torch.arange(stop)).square().sum().backward()
        optimizer.step()

    with local(typed("float32"), "sgd") as (model, optimizer):
        step(model, optimizer, 20)
        fleet.save_persistables(folder)
    with local(typed("int8"), "sgd", folder) as (model, optimizer):
        step(model, optimizer, 5)
        with pytest.raises(CheckpointError, match=naming("'words'", "int8", "float32", "mode=0")):
            fleet.save_persistables(folder, mode=1)
        fleet.save_persistables(folder)
        step(model, optimizer, 5)
        fleet.save_persistables(folder, mode=1)
        expected = rows("words", np.arange(20))
    with local(typed("int8"), "sgd", folder):
        assert np.array_equal(rows("words", np.arange(20)), expected)


def test_named_parameters_are_found_on_any_number_of_servers(folder: str) -> None:
    saved = save_local(folder)
    for num in (2, 3, 7):
        servers = Loaded(Model, "adam", num, dirname=folder, var_names=["hidden.weight", "words"])
        optimizer = lambda model: make_optimizer("adam", model)  # noqa: E731
        found = jobs.run(lambda part: None, Model, optimizer, servers=servers)
        assert np.array_equal(found.parts[0].model.hidden.weight.detach().numpy(), saved["hidden.weight"])
        assert not np.array_equal(found.parts[0].model.out.weight.detach().numpy(), saved["out.weight"])
        assert servers.num_rows("words") == np.count_nonzero(saved["words"].any(axis=1))


def test_no_names_load_nothing(folder: str) -> None:
    save_local(folder)
    with local(Model, seed=9) as (model, _):
        fresh = values(model)
    with local(Model, dirname=folder, var_names=[], seed=9) as (model, _):
        assert {name: value.tolist() for name, value in values(model).items()} == {
            name: value.tolist() for name, value in fresh.items()
        }


class OtherTower(Model):
    """The same tables under another tower."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(7, 11)
        self.out = torch.nn.Linear(11, 1)


def test_tables_can_be_taken_into_a_model_with_another_tower(folder: str) -> None:
    """Only what is named is loaded, so what is not named need not fit."""
    saved = save_local(folder)
    with local(OtherTower, dirname=folder, var_names=["items", "words"], seed=9):
        assert np.array_equal(rows("items", np.arange(NUM_ITEMS)), saved["items"])
        assert np.array_equal(rows("words", WORDS), saved["words"])


class Twisted(Model):
    """The same parameters, held in another order."""

    def __init__(self) -> None:
        super().__init__()
        hidden, norm = self.hidden, self.norm
        del self.hidden, self.norm
        self.hidden, self.norm = hidden, norm


@pytest.mark.parametrize("var_names", [None, ["hidden.weight"]], ids=["all", "one"])
def test_a_parameter_never_gets_the_values_of_another_one(folder: str, var_names: list[str] | None) -> None:
    """In a model whose parameters lie in another order they go by name, or there is an error: not into wrong places."""
    saved = save_local(folder)
    with local(Twisted, seed=9) as (model, _):
        fresh = values(model)
    try:
        with local(Twisted, dirname=folder, var_names=var_names, seed=9) as (model, _):
            found = values(model)
    except CheckpointError:
        return
    for name in saved:
        is_loaded = var_names is None or name in var_names
        assert np.array_equal(found[name], (saved if is_loaded else fresh)[name]), name


class Renamed(Model):
    """As many numbers, other names."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = self.hidden
        del self.hidden

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


def test_a_parameter_that_was_not_saved_is_named(folder: str) -> None:
    save_local(folder)
    with pytest.raises(CheckpointError, match=r"tower\.weight"), local(Renamed, dirname=folder):
        pass


@pytest.mark.parametrize("names", ["some", "all"])
def test_named_parameters_go_on_with_their_state_or_with_none(folder: str, names: str) -> None:
    """Adam's averages and its count of steps belong together: both as saved, or both anew."""
    make = lambda: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))  # noqa: E731
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(5)), torch.ones(20)

    def step(model: torch.nn.Module, optimizer: Any) -> None:
        (model(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    plain = make()
    continued = torch.optim.Adam(plain.parameters(), lr=0.05)
    with local(make) as (model, optimizer):
        for _ in range(10):
            step(model, optimizer)
            step(plain, continued)
        fleet.save_persistables(folder)
    torch.manual_seed(9)
    anew = make()
    chosen = [name for name, _ in anew.named_parameters()] if names == "all" else ["0.weight", "0.bias"]
    with local(make, dirname=folder, var_names=chosen, seed=9) as (model, optimizer):
        anew.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        plain.load_state_dict(anew.state_dict())
        step(model, optimizer)
    step(anew, torch.optim.Adam(anew.parameters(), lr=0.05))
    step(plain, continued)
    for name in chosen:
        value = model.state_dict()[name]
        is_one = [torch.allclose(value, other.state_dict()[name], atol=1e-6) for other in (anew, plain)]
        assert any(is_one), f"{name}: neither Adam from its start nor Adam that goes on"


# Another optimizer


class Plain(torch.nn.Module):
    """No layer of it is ours: plain torch trains it too."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(NUM_ITEMS, 4, sparse=True)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.out(self.items(batch["items"])).squeeze(1)


@pytest.mark.parametrize(("before", "after"), [("adagrad", "adam"), ("sgd", "adam"), ("adam", "adagrad")])
def test_under_another_optimizer_values_stay_and_its_state_starts_anew(before: str, after: str, folder: str) -> None:
    """The next step is the first step of a new optimizer of that kind."""
    with local(Plain, before) as (model, optimizer):
        train(model, optimizer, 0, 0, 10)
        fleet.save_persistables(folder)
        items, out = rows("items", np.arange(NUM_ITEMS)), model.out.weight.detach().clone()
    plain = Plain()
    with local(Plain, after, folder, seed=9) as (model, optimizer):
        assert np.array_equal(rows("items", np.arange(NUM_ITEMS)), items)
        assert torch.equal(model.out.weight, out)
        plain.load_state_dict({**plain.state_dict(), **{k: v for k, v in model.state_dict().items() if "out" in k}})
        plain.items.weight.data = torch.from_numpy(items.copy())
        train(model, optimizer, 0, 10, 11)
        found = rows("items", np.arange(NUM_ITEMS))
    options = {"lr": 0.05} if after == "adam" else {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}
    optimizers = jobs.plain_optimizers(after, plain, **options)
    both = type(
        "Both", (), {"step": lambda _: [o.step() for o in optimizers], "zero_grad": lambda _: plain.zero_grad()}
    )
    train(plain, both(), 0, 10, 11)
    assert np.allclose(found, plain.items.weight.detach().numpy(), atol=1e-6)
    assert torch.allclose(model.out.weight, plain.out.weight, atol=1e-6)


@pytest.mark.parametrize(
    "make_model", [Plain, lambda: torch.nn.Sequential(torch.nn.Linear(3, 1))], ids=["both", "dense"]
)
@pytest.mark.parametrize(("before", "after"), [("adagrad", "adam"), ("adam", "sgd"), ("sgd", "adam")])
def test_another_optimizer_is_told_on_stderr(
    before: str, after: str, make_model: Make, folder: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with local(make_model, before):
        fleet.save_persistables(folder)
    capfd.readouterr()
    with local(make_model, before, folder):
        pass
    assert capfd.readouterr().err == ""
    with local(make_model, after, folder):
        pass
    said = capfd.readouterr().err
    assert before in said
    assert after in said


# Mistakes


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=naming(f"{tmp_path}/nothing", "manifest.json")):
        Loaded(Model, "adam", 1, dirname=str(tmp_path / "nothing"))
    with (
        pytest.raises(CheckpointError, match=naming(tmp_path / "nothing")),
        local(Model, dirname=str(tmp_path / "nothing")),
    ):
        pass


def connect(servers: Loaded, dirname: str, rule: str = "adam") -> WorkerRole:
    class Worker(jobs.Worker):
        def __init__(self, job: Any) -> None:
            self._servers = servers
            WorkerRole.__init__(self, job, dirname)

    info = jobs.roles(1, len(servers))[0]
    return Worker(jobs.make_part(Model, lambda m: make_optimizer(rule, m), jobs.strategy(), info).job)


def test_a_worker_that_counts_on_a_model_finds_out_that_servers_have_not_loaded_it(folder: str, tmp_path: Path) -> None:
    save_local(folder)
    with pytest.raises(FleetError, match=naming("server 0", f"init_server('{folder}')")):
        connect(Loaded(Model, "adam", 2), folder)
    other = str(tmp_path / "other")
    save_local(other)
    with pytest.raises(FleetError, match=naming("server 0", other)):
        connect(Loaded(Model, "adam", 2, dirname=other), folder)
    connect(Loaded(Model, "adam", 2, dirname=folder), folder).stop()
    connect(Loaded(Model, "adam", 2, dirname=folder + "/"), folder).stop()


def changed(**modules: Callable[[], torch.nn.Module]) -> Make:
    def make() -> torch.nn.Module:
        model = Model()
        for name, module in modules.items():
            setattr(model, name, module())
        return model

    return make


DIFFERENT = {
    "dim": (changed(words=lambda: nn.SparseEmbedding(2, name="words")), r"'words'.*dim=3.*dim=2"),
    "size": (changed(items=lambda: torch.nn.Embedding(41, 4, sparse=True)), r"'items'.*size=40.*size=41"),
    "kind": (changed(items=lambda: nn.SparseEmbedding(4, name="items")), r"'items'.*kind=array"),
    "tower": (OtherTower, r"'(dense\.0|hidden\.\w+)'"),
    "table": (
        changed(more=lambda: nn.SparseEmbedding(2, name="more")),
        r"'more'.*words",
    ),
}


@pytest.mark.parametrize(("make_model", "text"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_model_that_differs_is_refused_and_the_difference_named(make_model: Make, text: str, folder: str) -> None:
    save_local(folder)
    with pytest.raises(CheckpointError, match=text):
        Loaded(make_model, "adam", 2, dirname=folder)


def test_names_that_were_not_saved_are_refused(folder: str) -> None:
    save_local(folder)
    with pytest.raises(CheckpointError, match=naming("hiden.weight", "wrods", "words", "hidden.weight")):
        Loaded(Model, "adam", 1, dirname=folder, var_names=["wrods", "items", "hiden.weight"])
    with pytest.raises(CheckpointError, match=naming("'items'")):
        Loaded(Model, "adam", 1, dirname=folder, var_names="items")


@pytest.mark.parametrize("names", [None, ["words"]])
@pytest.mark.parametrize("told", [False, True])
def test_init_server_alone_resumes_in_one_process(told: bool, names: list[str] | None, folder: str) -> None:
    """A script that says to the servers what to load goes on from it wherever it runs."""
    saved = save_local(folder)
    torch.manual_seed(7)
    fleet.init()
    model = fleet.distributed_model(Model())
    fleet.distributed_optimizer(make_optimizer("adam", model))
    fleet.init_server(folder, names)
    fleet.init_worker(*((folder, names) if told else ()))
    found = values(model)
    assert np.array_equal(found["words"], saved["words"])
    assert np.array_equal(found["hidden.weight"], saved["hidden.weight"]) == (names is None)
    fleet.stop_worker()


def test_in_one_process_two_different_models_to_load_are_refused(folder: str) -> None:
    save_local(folder)
    fleet.init()
    with pytest.raises(FleetError, match=naming("fleet.distributed_model")):
        fleet.init_server(folder)
    model = fleet.distributed_model(Model())
    fleet.distributed_optimizer(make_optimizer("adam", model))
    fleet.init_server(folder)
    with pytest.raises(FleetError, match=naming("init_worker", "'other'", "init_server")):
        fleet.init_worker("other")
    fleet.init_worker()
    with pytest.raises(FleetError, match=naming("fleet.init_server", "fleet.init_worker")):
        fleet.init_server(folder)
    fleet.stop_worker()


def test_a_save_that_replaces_a_model_which_was_not_loaded_says_so(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_local(folder)
    assert folder not in capsys.readouterr().err
    with local(Model, dirname=folder):
        fleet.save_persistables(folder)
        fleet.save_persistables(folder)
    assert folder not in capsys.readouterr().err
    with local(Model):
        fleet.save_persistables(folder)
        fleet.save_persistables(folder)
    error = capsys.readouterr().err
    assert sum(names(line, folder, 3) for line in error.splitlines()) == 1
    assert "fleet.init_worker(dirname)" in error
    assert not lines_naming(error.replace(folder, ""), "save 1")


@pytest.mark.parametrize("init", [fleet.init_worker, fleet.init_server])
def test_names_without_a_folder_are_refused(init: Callable[..., None]) -> None:
    fleet.init()
    with pytest.raises(FleetError, match="dirname"):
        init(var_names=["items"])


@pytest.mark.parametrize("mode", [7, 2, -1])
def test_other_modes_of_saving_are_refused(mode: int, folder: str) -> None:
    with local(Model), pytest.raises(FleetError, match=f"mode={mode}"):
        fleet.save_persistables(folder, mode=mode)
    assert not Path(folder).exists()


@pytest.mark.parametrize("save", [fleet.save_persistables, fleet.save_inference_model])
def test_saving_needs_a_worker_that_has_begun(save: Callable[[str], None], folder: str) -> None:
    with pytest.raises(FleetError, match="init_worker"):
        save(folder)
    fleet.init()
    with pytest.raises(FleetError, match="init_worker"):
        save(folder)


@pytest.mark.parametrize("save", [fleet.save_persistables, fleet.save_inference_model])
def test_the_error_of_a_place_that_cannot_be_written_is_raised(save: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with local(Model) as (model, optimizer):
        with pytest.raises(CheckpointError, match=naming(tmp_path / "file")):
            save(str(tmp_path / "file"))
        train(model, optimizer, 0, 0, 1)
        save(str(tmp_path / "model"))
