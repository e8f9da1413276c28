"""A LightningModule with sparse embeddings under Lightning's own Trainer: what plain Lightning makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.extras import needing
from support.grids import first_of
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun
from torch.utils.data import DataLoader

import torchfleet as fleet

pytestmark = [
    needing("lightning"),
    pytest.mark.xdist_group("lightning"),  # imported once, which takes seconds
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "lightning_job.py"


@pytest.fixture(scope="module")
def job() -> Any:
    from support.scripts import lightning_job

    return lightning_job


@pytest.fixture(autouse=True)
def _one_job() -> Iterator[None]:
    with jobs.clean_facade():
        yield


def plain(job: Any, folder: Path, **options: Any) -> Any:
    """Trained without a fleet, on dense tables: with Adagrad rows without a gradient keep their value."""
    module = job.Ratings(sparse=False)
    trainer = job.trainer(folder / "plain", **options)
    trainer.fit(module, loader(job), loader(job, seed=1, num=160))
    return module, trainer


def by_fleet(job: Any, folder: Path, **options: Any) -> Any:
    module = job.distributed(job.Ratings(sparse=True))
    fleet.init_worker()
    trainer = job.trainer(folder / "fleet", **options)
    trainer.fit(module, loader(job), loader(job, seed=1, num=160))
    return module, trainer


def loader(job: Any, **options: int) -> Any:
    return DataLoader(job.ratings(**options), job.BATCH)


@pytest.mark.parametrize(
    "options",
    first_of([{"enable_checkpointing": False, "accumulate_grad_batches": 4}, {"enable_checkpointing": False}]),
    ids=["accumulating", "as it is"],
)
def test_in_one_process_it_trains_to_the_result_of_lightning(job: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    expected, one = plain(job, tmp_path, **options)
    fleet.init()
    module, other = by_fleet(job, tmp_path, **options)
    torch.testing.assert_close(job.rated(module), job.rated(expected), rtol=0, atol=1e-5)
    assert other.global_step == one.global_step
    for name in ("loss", "error"):
        assert other.callback_metrics[name] == pytest.approx(float(one.callback_metrics[name]), abs=1e-5), name
    fleet.stop_worker()


def test_gradients_are_clipped_by_the_norm_of_all_of_them_rows_included(job: Any, tmp_path: Path) -> None:
    options = {"enable_checkpointing": False, "gradient_clip_val": 0.05}
    expected, _ = plain(job, tmp_path, **options)
    fleet.init()
    module, _ = by_fleet(job, tmp_path, **options)
    torch.testing.assert_close(job.rated(module), job.rated(expected), rtol=0, atol=1e-5)
    fleet.stop_worker()


def test_a_checkpoint_of_the_trainer_has_the_rows_and_loads_into_a_plain_module(job: Any, tmp_path: Path) -> None:
    fleet.init()
    module, trainer = by_fleet(job, tmp_path)
    path = trainer.checkpoint_callback.best_model_path
    found = job.rated(module)
    fleet.stop_worker()
    restored = job.Ratings.load_from_checkpoint(path, sparse=False)
    torch.testing.assert_close(job.rated(restored), found, rtol=0, atol=1e-6)


def test_a_checkpoint_of_plain_lightning_is_restored_into_a_fleet(job: Any, tmp_path: Path) -> None:
    expected, trainer = plain(job, tmp_path)
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    fleet.init()
    module = job.distributed(job.Ratings(sparse=True))
    fleet.init_worker()
    module.load_state_dict(saved)
    torch.testing.assert_close(job.rated(module), job.rated(expected), rtol=0, atol=1e-6)
    fleet.stop_worker()


def test_a_checkpoint_of_the_trainer_is_gone_on_from_with_the_optimizers_state(job: Any, tmp_path: Path) -> None:
    """By hand, without FleetStrategy, and from plain Lightning's file."""
    expected, _ = plain(job, tmp_path, max_epochs=2, enable_checkpointing=False)
    _, of_lightning = plain(job, tmp_path / "one", max_epochs=1)
    fleet.init()
    _, of_fleet = by_fleet(job, tmp_path, max_epochs=1)
    fleet.stop_worker()
    for one in (of_fleet, of_lightning):
        fleet.init()
        module = job.distributed(job.Ratings(sparse=True))
        fleet.init_worker()
        trainer = job.trainer(tmp_path / "more", max_epochs=2, enable_checkpointing=False)
        path = one.checkpoint_callback.best_model_path
        trainer.fit(module, loader(job), loader(job, seed=1, num=160), ckpt_path=path, weights_only=True)
        torch.testing.assert_close(job.rated(module), job.rated(expected), rtol=0, atol=1e-5)
        fleet.stop_worker()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("lightning_imported")
def test_one_server_and_two_workers_train_to_the_result_of_lightning(job: Any, tmp_path: Path) -> None:
    out = tmp_path / "rated.pt"
    roles = ["--server_num", "1", "--worker_num", "2"]
    with forked_fleetrun(tmp_path / "log", *roles, str(SCRIPT), str(out), FLEET_WORKER_TIMEOUT="60") as started:
        assert started.wait() == 0, started.output
    expected, _ = plain(job, tmp_path, enable_checkpointing=False)
    torch.testing.assert_close(torch.load(out, weights_only=True), job.rated(expected), rtol=0, atol=1e-5)
