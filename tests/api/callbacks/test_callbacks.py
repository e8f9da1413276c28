"""Callbacks: when they are called and with what; Weights & Biases and MLflow by what they have on disk afterwards."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extras import imported, is_installed
from support.messages import lines_naming, naming

import torchfleet as fleet
from torchfleet.api import current_job
from torchfleet.base.errors import FleetError

STEPS = 6


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    fleet.reset()


class Recorder:
    """Has no `on_save`: callbacks need not have all methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_start(self, info: Mapping[str, Any]) -> None:
        self.calls.append(("start", dict(info)))

    def on_report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("report", step, dict(metrics)))

    def on_end(self, stats: Mapping[str, Any]) -> None:
        self.calls.append(("end", dict(stats)))


def train(*callbacks: object, save: str | None = None) -> list[float]:
    """A job in this process; returns the losses that it reported."""
    fleet.init()
    for callback in callbacks:
        fleet.add_callback(callback)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(fleet.nn.SparseEmbedding(2, name="rows"), torch.nn.Flatten(), torch.nn.Linear(4, 1))
    model = fleet.distributed_model(layers)
    strategy = fleet.DistributedStrategy(a_sync=True, a_sync_configs={"send_queue_size": 3})
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    fleet.init_worker()
    losses = []
    for _ in range(STEPS):
        loss = (model(torch.arange(16).view(8, 2)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        fleet.report(loss=loss.item(), half=loss.item() / 2)
    if save is not None:
        fleet.save_persistables(save)
    fleet.stop_worker()
    return losses


@pytest.mark.slow
def test_a_callback_is_told_of_start_numbers_and_end() -> None:
    recorder = Recorder()
    losses = train(recorder, save="model")
    start, *reports, end = recorder.calls
    strategy = {"a_sync": True, "a_sync_configs": {"send_queue_size": 3}}
    assert start[1] | {"version": "", "strategy": ""} == {
        "mode": "async", "worker_index": 0, "num_workers": 1, "num_servers": 1, "version": "", "strategy": "",
    }  # fmt: skip
    assert start[1]["strategy"]["a_sync"] is strategy["a_sync"]
    assert start[1]["strategy"]["a_sync_configs"]["send_queue_size"] == 3
    assert reports == [("report", i + 1, {"loss": loss, "half": loss / 2}) for i, loss in enumerate(losses)]
    assert end[1]["worker"]["steps"] == STEPS


def test_a_callback_that_fails_is_told_and_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def on_report(self, step: int, metrics: Mapping[str, float]) -> None:
            raise ValueError("no such thing")

    recorder = Recorder()
    assert len(train(Broken(), recorder)) == STEPS
    assert len(recorder.calls) == STEPS + 2
    told = capsys.readouterr().err
    assert len(lines_naming(told, "Broken.on_report")) == STEPS
    assert "ValueError: no such thing" in told


def test_what_goes_wrong_at_the_start_is_raised() -> None:
    class Wrong:
        def on_start(self, info: Mapping[str, Any]) -> None:
            raise ValueError("no such project")

    with pytest.raises(ValueError, match="no such project"):
        train(Wrong())


@pytest.mark.parametrize("given", [object(), Recorder, "wandb", None])
def test_what_is_no_callback_is_refused(given: object) -> None:
    fleet.init()
    with pytest.raises(FleetError, match=naming("on_start", "on_report")):
        fleet.add_callback(given)


def test_other_workers_and_servers_do_not_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = {"FLEET_SERVER_ENDPOINTS": "127.0.0.1:7001", "FLEET_NUM_WORKERS": "2"}
    for role, number, num_called in (("WORKER", "1", 1), ("SERVER", "0", 0)):
        for name, value in {**endpoints, "FLEET_ROLE": role, f"FLEET_{role}_INDEX": number}.items():
            monkeypatch.setenv(name, value)
        fleet.init()
        fleet.add_callback(Recorder())
        fleet.add_callback(Recorder(), every_worker=True)
        assert len(current_job.current.callbacks._waiting) == num_called  # type: ignore[attr-defined]
        fleet.reset()


def test_passes_over_a_dataset_are_reported(tmp_path: Path) -> None:
    class Passes(fleet.callbacks.Callback):
        def __init__(self) -> None:
            self.reports: list[tuple[int, float]] = []
            self.epochs: list[tuple[int, list[str]]] = []

        def on_report(self, step: int, metrics: Mapping[str, float]) -> None:
            self.reports.append((step, metrics["loss"]))

        def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
            self.epochs.append((epoch, sorted(metrics)))

    (tmp_path / "part").write_text("".join(f"1 {i % 7} 1 {i % 2}\n" for i in range(60)))
    found, losses = Passes(), list[float]()
    fleet.init()
    fleet.add_callback(found)
    model = torch.nn.Sequential(fleet.nn.SparseEmbedding(1, name="rows"))
    model, optimizer = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dataset = fleet.InMemoryDataset()
    dataset.init(batch_size=10, use_var=[fleet.Slot("item", dim=1), fleet.Slot("click", dim=1)])
    dataset.set_filelist([str(tmp_path / "part")])
    dataset.load_into_memory()

    def step(batch: Any) -> torch.Tensor:
        loss = (model(batch["item"]).view(-1) - batch["click"].view(-1).float()).square().mean()
        losses.append(loss.item())
        return loss

    for _ in range(2):
        fleet.train_from_dataset(step, dataset, optimizer, print_period=3)
    fleet.stop_worker()
    assert found.reports == [(i, losses[i - 1]) for i in (3, 6, 9, 12)]
    assert found.epochs == [(0, ["loss", "samples_per_s"]), (1, ["loss", "samples_per_s"])]


@pytest.mark.slow
@pytest.mark.long
def test_weights_and_biases_has_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = imported("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    losses = train(fleet.callbacks.WandbCallback(project="tests", config={"lr": 0.1}), save="model")
    wandb.teardown()  # its own process, which writes the file, has ended
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history, summary, config = wandb_records(log)
    assert [(line["_step"], line["loss"]) for line in history] == [(i + 1, loss) for i, loss in enumerate(losses)]
    assert summary["saved"] == "model"
    assert summary["torchfleet/steps"] == STEPS
    assert config["lr"] == 0.1
    assert config["torchfleet"]["strategy.a_sync"] is True


def wandb_records(log: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """History, summary and config of an offline run, from the records that wandb keeps for `wandb sync`."""
    from wandb.proto import wandb_internal_pb2

    history, summary, config = list[dict[str, Any]](), dict[str, Any](), dict[str, Any]()
    for data in leveldb_records(log.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            line = {_name(item): json.loads(item.value_json) for item in record.history.item}
            history.append({**line, "_step": record.history.step.num})
        updates = [*record.run.config.update, *record.config.update]
        config |= {_name(item): json.loads(item.value_json) for item in updates}
        summary |= {_name(item): json.loads(item.value_json) for item in record.summary.update}
    return history, summary, config


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, behind a header of 7 bytes: blocks of 32 KiB, records cut by them."""
    offset, record = 7, b""
    while offset + 7 <= len(data):
        if (left := 32768 - offset % 32768) < 7:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def _name(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_mlflow_has_every_number(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = imported("mlflow")
    if kind == "sqlite" and not is_installed("sqlalchemy"):
        pytest.skip("needs mlflow: mlflow-skinny has no databases")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = f"file://{tmp_path}/runs" if kind == "file" else f"sqlite:///{tmp_path}/runs.db"
    callback = fleet.callbacks.MlflowCallback("ctr", run_name="first", tracking_uri=place, tags={"team": "a"})
    losses = train(callback, save="model")
    client = mlflow.MlflowClient(tracking_uri=place)
    run = client.get_run(callback.run_id)
    history = client.get_metric_history(callback.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(i + 1, loss) for i, loss in enumerate(losses)]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert client.get_experiment(run.info.experiment_id).name == "ctr"
    assert run.data.params["torchfleet.mode"] == "async"
    assert (run.data.tags["torchfleet.saved"], run.data.tags["team"]) == ("model", "a")
    assert run.data.metrics["torchfleet.steps"] == STEPS


def test_tensorboard_from_a_script_has_every_number(tmp_path: Path) -> None:
    reading = imported("tensorboard.backend.event_processing.event_accumulator")
    losses = train(fleet.callbacks.TensorBoardCallback(str(tmp_path / "events")))
    found = reading.EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(point.step, point.value) for point in found.Scalars("loss")] == [
        (i + 1, pytest.approx(loss, rel=1e-6)) for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(("package", "made"), [("wandb", "WandbCallback"), ("mlflow", "MlflowCallback")])
def test_a_package_that_is_missing_is_named(package: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FleetError, match=naming(made, f"pip install 'torchfleet[{package}]'")):
        train(getattr(fleet.callbacks, made)())
