"""fleet.prepare: one line in a script of torch's; in one process, under fleetrun with servers, and on ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.messages import lines_naming, naming
from support.paths import ROOT
from support.ranks import Ranks
from support.scripts.ends_by_itself import MODES, Counted
from support.scripts.launching import clean_environment, forked_fleetrun, run_dir
from support.scripts.prepared import Model, plain_parts, samples, train
from torch.utils.data import DataLoader

import torchfleet as fleet
from torchfleet.base.errors import FleetError, ModelError
from torchfleet.base.role.role_makers import is_collective_job

SCRIPT = str(ROOT / "tests" / "support" / "scripts" / "prepared.py")
ENDING = str(ROOT / "tests" / "support" / "scripts" / "ends_by_itself.py")
IDS = torch.arange(39).view(13, 3)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FLEET_ROLE", "TRAINING_ROLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    fleet.reset()


def predicted_by_torch() -> torch.Tensor:
    """Batches of 16 are what two workers see together."""
    parts = plain_parts(16)
    torch.manual_seed(0)
    train(*parts)
    return parts[0](IDS).detach()


@pytest.mark.slow
def test_one_server_and_two_workers_equal_plain_torch(tmp_path: Path) -> None:
    """The script does not call stop_worker, nor ask for its role. The servers' log tells what they did."""
    saved = str(tmp_path / "model")
    counts = ("--server_num", "1", "--worker_num", "2")
    with forked_fleetrun(tmp_path / "log", *counts, SCRIPT, "--model", saved, PYTHONPATH=str(ROOT)) as job:
        assert job.wait() == 0
    logs = run_dir(tmp_path / "log")
    assert "5 batches, rate 0.025" in (logs / "workerlog.1").read_text()
    assert lines_naming(job.output, "'places'", 40, "5 x 4")
    assert "'places'" not in (logs / "workerlog.1").read_text()
    torch.testing.assert_close(fleet.load_inference_model(saved, Model())(IDS), predicted_by_torch())
    said = (logs / "serverlog.0").read_text()
    expected = (
        *("listening on 127.0.0.1:", "for 2 workers", "'items' (40 ids x 4)", "worker 1 has joined from"),
        *(f"rows and the network to {saved}, save-", "has left (2 of 2)", "stopped (all workers have left)"),
    )
    assert [text for text in expected if text not in said] == []


@pytest.mark.slow
def test_a_script_in_one_process_stops_its_worker_at_the_end(tmp_path: Path) -> None:
    saved = str(tmp_path / "model")
    output = jobs.command([SCRIPT, "--batch_size", "16", "--model", saved], 200)
    assert lines_naming(output, "sync", 15, 210)
    torch.testing.assert_close(fleet.load_inference_model(saved, Model())(IDS), predicted_by_torch())


@pytest.mark.slow
@pytest.mark.long
def test_a_script_that_fails_does_not_say_that_its_worker_is_done(tmp_path: Path) -> None:
    """A real interpreter: what it does at its end after an error is what counts here."""
    command = [sys.executable, SCRIPT, "--model", str(tmp_path), "--fail"]
    environment = clean_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 1
    assert "this script fails" in done.stderr
    assert "samples" not in done.stdout


def end_by_itself(mode: str, folder: Path) -> None:
    """Two workers make three steps each; all of them must be in the model, and no process may fail."""
    saved, counts = str(folder / "model"), ("--server_num", "1", "--worker_num", "2")
    with forked_fleetrun(folder / "log", *counts, ENDING, mode, saved, PYTHONPATH=str(ROOT)) as job:
        assert job.wait() == 0, job.output
    model = fleet.load_inference_model(saved, Counted())
    applied = {"sync": (-3.0, -3.0), "hybrid": (-6.0, -3.0)}.get(mode, (-6.0, -6.0))  # of rows, of the network
    found = float(model.rows(torch.tensor(0))[0]), float(model.network[7])
    assert found == pytest.approx(applied, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["geo", "async"])
def test_a_script_that_ends_by_itself_loses_no_push(mode: str, tmp_path: Path) -> None:
    end_by_itself(mode, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_fifty_scripts_that_end_by_themselves_lose_no_push(mode: str, tmp_path: Path) -> None:
    for number in range(50):
        end_by_itself(mode, tmp_path / str(number))


class Own(DataLoader[Any]):
    """A subclass, as those of RecBole and PyTorch Geometric, with an attribute of its own."""

    epoch = 0


class Iterated(Own):
    def __iter__(self) -> Any:
        self.epoch += 1
        return super().__iter__()


def on_a_rank(is_own: bool) -> dict[str, Any]:
    model, optimizer, _, scheduler = plain_parts(8)
    kind = Iterated if is_own else DataLoader
    parts = fleet.prepare(model, optimizer, kind(samples(), 8, shuffle=True), scheduler)
    torch.manual_seed(fleet.worker_index())
    train(*parts)
    found = {"out": parts[0](IDS).detach(), "length": len(parts[2])}
    fleet.stop_worker()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_own", [False, True])
def test_two_ranks_equal_plain_torch(ranks: Ranks, is_own: bool) -> None:
    """Also where batches are dealt out whole: the last round has one batch of six samples, which both ranks get."""
    for found in ranks.run(on_a_rank, 2, is_own=is_own):
        assert found["length"] == 5
        torch.testing.assert_close(found["out"], predicted_by_torch())


def test_what_is_given_comes_back_in_its_order() -> None:
    model, optimizer, loader, scheduler = plain_parts(8)
    given = fleet.prepare(scheduler, loader, optimizer, DataLoader(samples()), model, sparse="auto")
    assert given[0] is scheduler
    assert given[4] is model
    assert len(given[1]) == len(loader)
    assert given[3].batch_size == 1
    assert given[1].dataset is loader.dataset
    assert given[2].param_groups is optimizer.param_groups
    with pytest.raises(FleetError, match=naming("fleet.reset")):
        fleet.prepare(model, optimizer)


def test_a_prepared_loader_in_prefetch_counts_each_sample_once() -> None:
    model, optimizer, loader = fleet.prepare(*plain_parts(8)[:3], sparse="auto")
    for ids, target in fleet.prefetch(loader):
        (model(ids) - target).square().mean().backward()
        optimizer.step()
    worker = fleet.stats()["worker"]
    assert (worker["steps"], worker["samples"]) == (len(loader), len(samples()))
    fleet.stop_worker()


@pytest.mark.parametrize("kind", [DataLoader, Own, Iterated])
def test_what_comes_back_is_a_loader_of_the_same_class(kind: type[DataLoader[Any]]) -> None:
    model, optimizer = plain_parts(8)[:2]
    loader = kind(samples(), 8, shuffle=True)
    *_, prepared = fleet.prepare(model, optimizer, loader, sparse="auto")
    assert isinstance(prepared, kind)
    assert prepared.dataset is loader.dataset
    assert prepared.sampler is loader.sampler
    assert prepared.batch_sampler is loader.batch_sampler
    assert (prepared.batch_size, prepared.drop_last, len(prepared)) == (8, False, len(loader))
    torch.manual_seed(5)
    expected = list(loader)
    torch.manual_seed(5)
    torch.testing.assert_close(list(prepared), expected)
    if kind is Iterated:
        assert prepared.epoch == 2
    fleet.reset()
    with pytest.raises(FleetError, match=naming("argument 2")):
        fleet.prepare(optimizer, prepared, model)


def test_embeddings_that_share_a_weight_stay_in_the_optimizer() -> None:
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Embedding(9, 2, sparse=True), "b": torch.nn.Embedding(9, 2, sparse=True)}
    )
    model["b"].weight = model["a"].weight
    _, optimizer = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert {id(parameter) for parameter in model.parameters()} <= set(map(id, optimizer.param_groups[0]["params"]))
    (model["a"](torch.tensor([1])) + model["b"](torch.tensor([1]))).sum().backward()
    before = model["a"](torch.tensor([1])).detach()
    optimizer.step()
    torch.testing.assert_close(model["b"](torch.tensor([1])).detach(), before - 0.2)


def test_two_optimizers_each_for_their_parameters() -> None:
    def parts() -> tuple[Model, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Model()
        rows = [module for module in model.modules() if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)]
        for module in rows:
            module.sparse = True
        sparse = [module.weight for module in rows]
        dense = [parameter for parameter in model.parameters() if all(parameter is not weight for weight in sparse)]
        return model, torch.optim.SparseAdam(sparse, lr=0.01), torch.optim.Adam(dense, lr=0.01)

    def losses(model: Model, *optimizers: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(4):
            loss = model(IDS).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = losses(*parts())
    assert losses(*fleet.prepare(*parts())) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (lambda m, o, d: (m,), "optimizer 1"),
        (lambda m, o, d: (m, o, o), "optimizers"),
        (lambda m, o, d: (o, d), "model 0"),
        (lambda m, o, d: (m, o, [1, 2]), "3 DataLoader [1, 2]"),
    ],
)
def test_what_cannot_be_prepared_is_named(objects: Any, message: str) -> None:
    with pytest.raises((FleetError, ModelError), match=naming(*message.split())):
        fleet.prepare(*objects(*plain_parts(8)[:3]))


def test_a_wrong_optimizer_can_be_corrected() -> None:
    model = Model()
    with pytest.raises(FleetError):
        fleet.prepare(model, torch.optim.NAdam(model.parameters()), sparse=40)
    fleet.init()
    fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), sparse=40)


def test_an_optimizer_that_has_made_steps_is_refused_and_a_fresh_adagrad_is_not() -> None:
    model = Model()
    used = torch.optim.Adam(model.parameters())
    model(IDS).sum().backward()
    used.step()
    with pytest.raises(ModelError, match=naming("fleet.prepare", "optimizer")):
        fleet.prepare(model, used, sparse=40)
    fleet.init()
    model = Model()
    fleet.prepare(model, torch.optim.Adagrad(model.parameters()), sparse=40)


def test_the_kind_of_job_is_what_the_environment_says() -> None:
    assert not is_collective_job({})
    assert is_collective_job({"RANK": "0", "WORLD_SIZE": "2"})
    assert not is_collective_job({"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "0"})
