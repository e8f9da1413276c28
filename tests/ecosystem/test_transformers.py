"""Hugging Face's Trainer and a loop of accelerate: with a fleet's model and optimizer what they are with plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.extras import needing
from support.messages import naming
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun
from torch.utils.data import DataLoader

import torchfleet as fleet
from torchfleet.base.errors import ModelError

pytestmark = [
    needing("transformers", "accelerate"),
    pytest.mark.xdist_group("transformers"),  # imported once, which takes seconds
]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "transformers_job.py"
PATIENCE = 200.0  # seconds of a fleet whose processes all import transformers


@pytest.fixture(scope="module")
def job() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        from support.scripts import transformers_job

        yield transformers_job


@pytest.fixture(autouse=True)
def _one_job() -> Iterator[None]:
    with jobs.clean_facade():
        yield


def plain(job: Any, folder: Path, **options: Any) -> tuple[torch.Tensor, list[float]]:
    """Answers of the model that the Trainer alone trains, and its losses."""
    model = job.make_model()
    trainer = job.make_trainer(model, job.make_optimizer(model), folder, job.Sentences(), **options)
    trainer.train()
    return job.answers(model), losses(trainer)


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def with_rows_on_servers(job: Any) -> tuple[Any, Any]:
    fleet.init()
    model = job.make_model()
    model.bert.embeddings.word_embeddings.sparse = True
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(job.make_optimizer(model))
    fleet.init_worker()
    return model, optimizer


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=["as it is", "accumulating"])
def test_rows_on_servers_train_to_the_result_of_the_trainer(job: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    expected, expected_losses = plain(job, tmp_path, **options)
    model, optimizer = with_rows_on_servers(job)
    trainer = job.make_trainer(model, optimizer, tmp_path, job.Sentences(), **options)
    trainer.train()
    torch.testing.assert_close(job.answers(model), expected, rtol=0, atol=1e-5)
    assert losses(trainer) == pytest.approx(expected_losses, abs=1e-5)
    fleet.stop_worker()


def test_gradients_are_clipped_by_the_norm_of_all_of_them_rows_included(job: Any, tmp_path: Path) -> None:
    expected, _ = plain(job, tmp_path, max_grad_norm=0.05)
    model, optimizer = with_rows_on_servers(job)
    job.make_trainer(model, optimizer, tmp_path, job.Sentences(), max_grad_norm=0.05).train()
    torch.testing.assert_close(job.answers(model), expected, rtol=0, atol=1e-5)
    fleet.stop_worker()


def test_a_model_that_the_trainer_saves_has_the_rows_and_loads_without_a_fleet(job: Any, tmp_path: Path) -> None:
    model, optimizer = with_rows_on_servers(job)
    trainer = job.make_trainer(model, optimizer, tmp_path, job.Sentences())
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    found = job.answers(model)
    fleet.stop_worker()
    restored = job.BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(job.answers(restored), found, rtol=0, atol=1e-6)


def test_a_checkpoint_of_the_trainer_is_gone_on_from_with_the_optimizers_state(job: Any, tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    expected, _ = plain(job, tmp_path / "plain", max_steps=4)
    model, optimizer = with_rows_on_servers(job)
    job.make_trainer(model, optimizer, tmp_path, job.Sentences(), **options).train()
    fleet.stop_worker()
    model, optimizer = with_rows_on_servers(job)
    trainer = job.make_trainer(model, optimizer, tmp_path, job.Sentences(), **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(job.answers(model), expected, rtol=0, atol=1e-5)
    fleet.stop_worker()


def test_states_that_accelerate_saves_are_gone_on_from(job: Any, tmp_path: Path) -> None:
    from accelerate import Accelerator

    def train(first: int, stop: int, load: bool) -> Any:
        model, optimizer = with_rows_on_servers(job)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        model.train()
        if load:
            accelerator.load_state(str(tmp_path))
        for batch in list(DataLoader(job.Sentences(), job.BATCH))[first:stop]:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if not load and stop == 2:
            accelerator.save_state(str(tmp_path))
        found = job.answers(accelerator.unwrap_model(model))
        fleet.stop_worker()
        return found

    expected = train(0, 4, load=False)
    train(0, 2, load=False)
    torch.testing.assert_close(train(2, 4, load=True), expected, rtol=0, atol=1e-6)


def test_a_loop_of_accelerate_with_rows_on_servers_trains_to_the_result_without(job: Any) -> None:
    from accelerate import Accelerator

    def trained(model: Any, optimizer: Any) -> torch.Tensor:
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(job.Sentences(), job.BATCH)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        model.train()
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return job.answers(accelerator.unwrap_model(model))

    model = job.make_model()
    expected = trained(model, job.make_optimizer(model))
    torch.testing.assert_close(trained(*with_rows_on_servers(job)), expected, rtol=0, atol=1e-5)
    fleet.stop_worker()


def test_the_trainer_finds_what_a_collective_model_takes(job: Any, tmp_path: Path) -> None:
    expected, _ = plain(job, tmp_path)
    fleet.init(is_collective=True)
    model = fleet.distributed_model(job.make_model())
    optimizer = fleet.distributed_optimizer(job.make_optimizer(model))
    job.make_trainer(model, optimizer, tmp_path, job.Sentences()).train()
    torch.testing.assert_close(job.answers(model), expected, rtol=0, atol=0)
    fleet.stop_worker()


def test_mixed_precision_of_the_trainer_which_a_collective_model_would_not_get_is_refused(
    job: Any, tmp_path: Path
) -> None:
    from accelerate.state import AcceleratorState

    fleet.init(is_collective=True)
    model = fleet.distributed_model(job.make_model())
    optimizer = fleet.distributed_optimizer(job.make_optimizer(model))
    trainer = job.make_trainer(model, optimizer, tmp_path, job.Sentences(), bf16=True)
    try:
        with pytest.raises(ModelError, match=naming("bf16", "amp=True")):
            trainer.train()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # which is that of the process
    fleet.stop_worker()


@pytest.mark.slow
@pytest.mark.usefixtures("transformers_imported")
@pytest.mark.parametrize(
    ("kind", "processes"),
    [
        ("servers", ["--server_num", "1", "--worker_num", "2"]),
        pytest.param("collective", ["--nproc_per_node", "2"], marks=pytest.mark.long),  # tests/apps has two ranks, too
    ],
    ids=["one server, two workers", "two ranks"],
)
def test_two_processes_with_half_of_each_batch_train_to_the_result_of_the_trainer(
    job: Any, tmp_path: Path, kind: str, processes: list[str]
) -> None:
    out = tmp_path / "answers.pt"
    command = [str(SCRIPT), str(out), kind]
    with forked_fleetrun(tmp_path / "log", *processes, *command, FLEET_WORKER_TIMEOUT="60") as started:
        assert started.wait(PATIENCE) == 0, started.output
    expected, _ = plain(job, tmp_path)
    torch.testing.assert_close(torch.load(out, weights_only=True), expected, rtol=0, atol=1e-5)
