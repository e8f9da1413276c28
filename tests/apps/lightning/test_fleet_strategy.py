"""FleetStrategy against plain Lightning: the same module, data and Trainer in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.extras import needing
from support.grids import first_of
from support.messages import naming
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun
from torch.utils.data import DataLoader, DistributedSampler

import torchfleet as fleet
from torchfleet.api import process_role
from torchfleet.base.errors import FleetError, ModelError, StrategyError

pytestmark = [
    needing("lightning"),
    pytest.mark.xdist_group("lightning"),  # imported once, which takes seconds
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "lightning_strategy_job.py"
PATIENCE = 200.0  # seconds of a fleet whose processes all import Lightning


@pytest.fixture(scope="module")
def job() -> Any:
    from support.scripts import lightning_job

    import torchfleet.apps.lightning  # noqa: F401  # registers the names of strategies

    return lightning_job


@pytest.fixture(autouse=True)
def _one_job() -> Iterator[None]:
    with jobs.clean_facade():
        yield


def loader(job: Any, **options: int) -> Any:
    return DataLoader(job.ratings(**options), job.BATCH)


def plain(job: Any, folder: Path, **options: Any) -> tuple[torch.Tensor, Any]:
    """What the module rates after plain Lightning has trained it on dense tables, and the Trainer.

    With `shuffled` in the order of Lightning's sampler for several workers, of which each takes every n-th sample.
    """
    samples = job.ratings()
    sampler = DistributedSampler(samples, num_replicas=1, rank=0) if options.pop("shuffled", False) else None
    module, trainer = job.Ratings(sparse=False), job.trainer(folder / "plain", **options)
    trainer.fit(module, DataLoader(samples, job.BATCH, sampler=sampler), loader(job, seed=1, num=160))
    return job.rated(module), trainer


def fitted(job: Any, folder: Path, strategy: Any, module: Any = None, **options: Any) -> tuple[Any, Any]:
    ckpt_path = options.pop("ckpt_path", None)
    module = job.Ratings(sparse=True) if module is None else module
    trainer = job.trainer(folder / "fleet", strategy=strategy, **options)
    trainer.fit(module, loader(job), loader(job, seed=1, num=160), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.slow
def test_one_argument_trains_to_the_result_of_lightning_and_goes_on_from_its_checkpoint(
    job: Any, tmp_path: Path
) -> None:
    expected, one = plain(job, tmp_path, gradient_clip_val=0.5)
    module, other = fitted(job, tmp_path, fleet.lightning.FleetStrategy("sync"), gradient_clip_val=0.5)
    torch.testing.assert_close(job.rated(module), expected, rtol=0, atol=1e-5)
    assert (other.global_step, other.world_size, other.global_rank) == (one.global_step, 1, 0)
    for name in ("loss", "error"):
        assert other.callback_metrics[name] == pytest.approx(float(one.callback_metrics[name]), abs=1e-5), name
    assert other.validate(module, loader(job, seed=1, num=160), verbose=False)[0]["error"] == pytest.approx(
        float(one.callback_metrics["error"]), abs=1e-5
    )

    path = other.checkpoint_callback.best_model_path
    restored = job.Ratings.load_from_checkpoint(path, sparse=False)
    torch.testing.assert_close(job.rated(restored), expected, rtol=0, atol=1e-5)

    with torch.no_grad():
        module.tower[0].weight.zero_()
    other.test_loop.verbose = False
    module.test_step = module.validation_step
    tested = other.test(module, loader(job, seed=1, num=160), ckpt_path="best", verbose=False)
    assert tested[0]["error"] == pytest.approx(float(one.callback_metrics["error"]), abs=1e-5)
    fleet.stop_worker()

    longer, _ = plain(job, tmp_path, max_epochs=job.EPOCHS + 1, gradient_clip_val=0.5)
    again, _ = fitted(job, tmp_path, "fleet_sync", max_epochs=job.EPOCHS + 1, gradient_clip_val=0.5, ckpt_path=path)
    torch.testing.assert_close(job.rated(again), longer, rtol=0, atol=1e-5)
    fleet.stop_worker()


@pytest.mark.parametrize("mode", first_of(["hybrid", "async"]))
def test_other_modes_learn_what_lightning_learns(job: Any, tmp_path: Path, mode: str) -> None:
    _, one = plain(job, tmp_path, enable_checkpointing=False)
    _, other = fitted(job, tmp_path, f"fleet_{mode}", enable_checkpointing=False)
    assert process_role.mode() == mode
    assert float(other.callback_metrics["error"]) < float(one.callback_metrics["error"]) + 0.2  # it begins with 3.3
    fleet.stop_worker()


def test_rows_for_any_id_are_saved_beside_the_checkpoint_and_old_ones_are_removed(job: Any, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class AnyIds(job.Ratings):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(sparse=True)
            self.users, self.items = fleet.nn.SparseEmbedding(4, name="u"), fleet.nn.SparseEmbedding(4, name="i")

    keep_one = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_epochs=1)
    module, _ = fitted(job, tmp_path, fleet.lightning.FleetStrategy("async"), AnyIds(), callbacks=[keep_one])
    expected = job.rated(module)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        Path(keep_one.best_model_path).name,
        f"{Path(keep_one.best_model_path).name}.fleet",
    ]
    with pytest.raises(FleetError, match=r"\.fleet"):
        fitted(job, tmp_path, fleet.lightning.FleetStrategy("async"), module, ckpt_path=keep_one.best_model_path)
    fleet.reset()
    other = AnyIds()
    options = {"ckpt_path": keep_one.best_model_path, "enable_checkpointing": False}
    fitted(job, tmp_path, fleet.lightning.FleetStrategy("async"), other, **options)  # it had trained all epochs
    torch.testing.assert_close(job.rated(other), expected, rtol=0, atol=1e-6)
    fleet.stop_worker()


def test_what_cannot_be_is_said(job: Any, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=naming("FleetStrategy('fast')", "sync", "half_async", "async")):
        fleet.lightning.FleetStrategy("fast")
    with pytest.raises(StrategyError, match=naming("devices=2", "--worker_num")):
        fitted(job, tmp_path, fleet.lightning.FleetStrategy(), devices=2, enable_checkpointing=False)
    module = job.Ratings(sparse=True)
    module.configure_optimizers = lambda: None
    with pytest.raises(ModelError, match="configure_optimizers"):
        fitted(job, tmp_path, fleet.lightning.FleetStrategy(), module, enable_checkpointing=False)
    fitted(job, tmp_path, fleet.lightning.FleetStrategy(), enable_checkpointing=False, max_epochs=1)
    with pytest.raises(FleetError, match=naming("fleet.stop_worker")):
        fitted(job, tmp_path, fleet.lightning.FleetStrategy(), enable_checkpointing=False)
    fleet.stop_worker()


RANK_1 = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
WORKERS = {"FLEET_SERVER_ENDPOINTS": "a:1", "FLEET_NUM_WORKERS": "4", "FLEET_WORKER_ENDPOINTS": "b:1,b:2,c:1,c:2"}
WORKER_3 = {**WORKERS, "FLEET_ROLE": "WORKER", "FLEET_WORKER_INDEX": "3"}
SERVER_0 = {**WORKERS, "FLEET_ROLE": "SERVER", "FLEET_SERVER_INDEX": "0"}


@pytest.mark.parametrize(
    ("environment", "named", "expected"),
    [
        (RANK_1, [0, 1], "cuda:1"),  # Trainer(devices="auto") on two GPUs: one for each rank of the machine
        (RANK_1, [0], "cuda:1"),  # Trainer(devices=1): not the same GPU for both ranks
        (WORKER_3, [0, 1], "cuda:1"),  # the second worker of machine c
        ({**WORKER_3, "FLEET_WORKER_ENDPOINTS": "b:1,b:2,b:3,b:4"}, [0, 1], "cuda:1"),  # four workers share two
        (SERVER_0, [0, 1], "cpu"),
        ({}, [1], "cuda:1"),  # one process, Trainer(devices=[1])
        ({}, [0, 1], "cuda:0"),
    ],
)
def test_each_process_of_a_machine_has_a_gpu_of_its_own(
    job: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], named: list[int], expected: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    strategy = fleet.lightning.FleetStrategy("sync")
    strategy.parallel_devices = [torch.device("cuda", number) for number in named]
    strategy.check_devices()
    assert strategy.root_device == torch.device(expected)


def test_gpus_that_a_process_cannot_have_are_refused(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    strategy = fleet.lightning.FleetStrategy("sync")
    strategy.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(StrategyError, match=naming("devices=2", 4)):
        strategy.check_devices()
    strategy.parallel_devices = [torch.device("cuda", 0)]
    monkeypatch.setenv("FLEET_DEVICE", "cpu")
    with pytest.raises(StrategyError, match=naming("Trainer(accelerator='cpu')")):
        strategy.check_devices()
    monkeypatch.delenv("FLEET_DEVICE")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(StrategyError, match=naming("rank 1", "GPU", 1)):
        strategy.check_devices()


@pytest.mark.slow
@pytest.mark.usefixtures("lightning_imported")
@pytest.mark.parametrize(
    ("kind", "processes", "options"),
    [
        ("sync", ["--server_num", "1", "--worker_num", "2"], {}),
        ("ranks", ["--nproc_per_node", "2"], {"gradient_clip_val": 2.0}),
    ],
    ids=["one server, two workers", "two ranks that merge gradients"],
)
def test_two_processes_train_to_the_result_of_lightning(
    job: Any, tmp_path: Path, kind: str, processes: list[str], options: dict[str, Any]
) -> None:
    out = tmp_path / "told.pt"
    with forked_fleetrun(tmp_path / "log", *processes, str(SCRIPT), str(out), kind) as started:
        assert started.wait(PATIENCE) == 0, started.output
    expected, one = plain(job, tmp_path, shuffled=True, **options)
    told = torch.load(out, weights_only=True)
    torch.testing.assert_close(told["rated"], expected, rtol=0, atol=1e-5)
    assert told["world_size"] == 2
    assert told["seen"] == job.EPOCHS * job.RATINGS // 2, "each worker has its share of the samples"
    assert told["metrics"]["rank"] == 2 * (0 + 1), "both ranks' values, of two batches"
    assert told["metrics"]["error"] == pytest.approx(float(one.callback_metrics["error"]), abs=1e-5)
    restored = job.Ratings.load_from_checkpoint(told["checkpoint"], sparse=False)
    torch.testing.assert_close(job.rated(restored), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["pipeline", "context_parallel"])
def test_strategies_that_need_the_models_own_call_are_refused(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable, value in RANK_1.items():
        monkeypatch.setenv(variable, value)
    strategy = fleet.lightning.FleetStrategy(fleet.DistributedStrategy(**{name: True}))
    with pytest.raises(StrategyError, match=naming(name, "Lightning")):
        strategy._refuse_twice(job.trainer(tmp_path))
