"""DistributedInfer: after training in the same job and in every mode, as a job of its own with another number of
servers, in one process; what it predicts is what load_inference_model predicts in a plain process; and mistakes."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.cases import each_of
from support.messages import naming
from support.scripts import inferring, slotted
from support.scripts.inferring import Net, make_optimizer, num_rows, predictions, test_batches
from support.scripts.launching import Forked, forked_fleetrun

import torchfleet as fleet
from torchfleet.api import current_job
from torchfleet.api.job.worker_role import WorkerRole
from torchfleet.base.errors import CheckpointError, FleetError, ModelError
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink

SCRIPT = str(Path(inferring.__file__))
test_batches.__test__ = False  # type: ignore[attr-defined]


def plain_scores(folder: Path) -> list[torch.Tensor]:
    """What the saved model says without any fleet."""
    torch.manual_seed(99)
    model = fleet.load_inference_model(str(folder), Net())
    with torch.no_grad():
        return [model(batch) for batch in test_batches()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def saved_model(folder: Path, mode: str = "sync", num_servers: int = 2, kind: str = "inference") -> Path:
    """A model trained a little."""
    with slotted.job(Net(), make_optimizer, mode=mode, num_servers=num_servers) as part:
        inferring.train(part.model, part.optimizer, worker=0)
        getattr(fleet, {"inference": "save_inference_model", "full": "save_persistables"}[kind])(str(folder))
    return folder


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.3)


# In the job that has trained


@pytest.mark.parametrize("mode", jobs.MODES)
def test_straight_after_training_it_predicts_what_the_saved_model_does(tmp_path: Path, mode: str) -> None:
    with slotted.job(Net(), sgd if mode == "geo" else make_optimizer, mode=mode, num_servers=2) as part:
        inferring.train(part.model, part.optimizer, worker=0)
        infer = fleet.DistributedInfer(part.model)
        infer.init_distributed_infer_env()
        found = predictions(infer)
        fleet.save_inference_model(str(tmp_path / "model"))
    assert_equal(found["scores"], plain_scores(tmp_path / "model"))
    assert torch.equal(found["again"], found["scores"][0])
    before, after = found["rows"]
    assert before == after


def test_after_prediction_training_goes_on_as_if_there_had_been_none(tmp_path: Path) -> None:
    trained = []
    for predicts in (False, True):
        torch.manual_seed(0)
        with slotted.job(Net(), make_optimizer, num_servers=2) as part:
            torch.manual_seed(1)  # dropout
            inferring.train(part.model, part.optimizer, worker=0)
            if predicts:
                infer = fleet.DistributedInfer(part.model)
                infer.init_distributed_infer_env()
                infer.predict(test_batches()[1])
            inferring.train(part.model, part.optimizer, worker=1)
            folder = tmp_path / str(predicts)
            fleet.save_inference_model(str(folder))
        trained.append(plain_scores(folder))
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)


def test_what_is_pushed_nowhere_changes_nothing(tmp_path: Path) -> None:
    """Neither rows nor steps: the servers' statistics stay as they are."""
    with slotted.job(Net(), make_optimizer, mode="async", num_servers=2) as part:
        inferring.train(part.model, part.optimizer, worker=0)
        infer = fleet.DistributedInfer(part.model)
        infer.init_distributed_infer_env()
        before = [part.worker._servers.counts(name) for name in ("PUSH", "ASSIGN", "SET_DENSE")]
        predictions(infer)
        assert [part.worker._servers.counts(name) for name in ("PUSH", "ASSIGN", "SET_DENSE")] == before


@pytest.mark.slow
def test_two_workers_predict_alike_after_training_and_in_a_job_with_more_servers(tmp_path: Path) -> None:
    with forked_fleetrun(
        tmp_path / "log", "--server_num", "2", "--worker_num", "2", SCRIPT, "train", str(tmp_path)
    ) as job:
        assert job.wait() == 0, job.output
    expected = plain_scores(tmp_path / "model")
    log = tmp_path / "log2"
    with forked_fleetrun(log, "--server_num", "3", "--worker_num", "2", SCRIPT, "predict", str(tmp_path)) as job:
        assert job.wait() == 0, job.output
    for what in ("train", "predict"):
        for worker in range(2):
            found = pickle.loads((tmp_path / f"{what}-{worker}").read_bytes())
            scores = found["scores"]
            assert_equal(scores, expected)  # running means are worker 0's on all workers
            before, after = found["rows"]
            assert before == after
            assert before["users"] > 0
            assert "fleet.load_inference_model" in found["too late"], "after stop_worker"
    for server in range(3):
        assert "the server has served" in (log / "latest" / f"serverlog.{server}").read_text()


@each_of("mode", jobs.MODES)
def test_after_the_worker_was_stopped_an_error_says_what_to_do_instead(mode: str) -> None:
    servers = jobs.SocketServers(Net, sgd, 1, 1)
    servers.start()
    part = jobs.make_part(Net, sgd, jobs.strategy(mode), servers.info(0, 1))
    part.worker = WorkerRole(part.job)
    inferring.train(part.model, part.optimizer, worker=0, num_steps=2)
    part.worker.stop()
    late = naming("fleet.stop_worker()", "fleet.load_inference_model")
    part.model.eval()
    for predict in (part.model, lambda batch: part.model.users(batch["users"])):
        with pytest.raises(FleetError, match=late):
            predict(test_batches()[0])
    with pytest.raises(FleetError, match=late):
        part.optimizer.step()
    with pytest.raises(FleetError, match=naming("server 0", "STATS")):
        part.worker.client.stats()
    assert servers.is_over()


# As a job of its own, in one process


@pytest.mark.parametrize("kind", ["inference", "full"])
def test_one_process_predicts_from_either_kind_of_save(tmp_path: Path, kind: str) -> None:
    folder = saved_model(tmp_path / "model", kind=kind, num_servers=3)
    expected = plain_scores(folder)
    with jobs.clean_facade():
        fleet.init()
        torch.manual_seed(5)
        model = Net()
        infer = fleet.DistributedInfer(model)
        infer.init_distributed_infer_env(dirname=str(folder))
        found = predictions(infer)
        assert not model.training
        assert fleet.stats()["worker"]["steps"] == 0
        fleet.stop_worker()
    assert_equal(found["scores"], expected)
    assert found["rows"][0] == found["rows"][1]


def test_a_process_can_predict_with_one_model_after_the_other(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = saved_model(tmp_path / "first")
    torch.manual_seed(2)
    second = saved_model(tmp_path / "second")
    for folder in (first, second):
        with jobs.clean_facade():
            fleet.init()
            infer = fleet.DistributedInfer(Net())
            infer.init_distributed_infer_env(str(folder))
            found = infer.predict(test_batches()[0])
            fleet.stop_worker()
        assert_equal([found], plain_scores(folder)[:1])


def test_unknown_ids_read_as_zeros(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    with jobs.clean_facade():
        fleet.init()
        model = Net()
        infer = fleet.DistributedInfer(model)
        infer.init_distributed_infer_env(dirname=str(folder))
        rows = num_rows()["users"]
        with torch.no_grad():
            assert not model.users(torch.tensor([123456789, -1, 2**63 - 1])).any()
        assert num_rows()["users"] == rows
        fleet.stop_worker()


def test_a_model_that_is_in_training_mode_is_still_asked_in_eval_mode(tmp_path: Path) -> None:
    """No dropout, no running means that move, no new rows."""
    folder = saved_model(tmp_path / "model")
    with jobs.clean_facade():
        fleet.init()
        model = Net()
        infer = fleet.DistributedInfer(model)
        infer.init_distributed_infer_env(dirname=str(folder))
        model.train()
        found = predictions(infer)
        fleet.stop_worker()
    assert_equal(found["scores"], plain_scores(folder))
    assert found["rows"][0] == found["rows"][1]


def test_embeddings_that_were_moved_by_the_argument_sparse_are_moved_for_prediction_too(tmp_path: Path) -> None:
    def made() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 1))  # neither says sparse=True

    ids = torch.arange(20)
    with jobs.clean_facade():
        fleet.init()
        model = fleet.distributed_model(made(), sparse=50)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        fleet.init_worker()
        model(ids).sum().backward()
        optimizer.step()
        fleet.save_inference_model(str(tmp_path / "model"))
        with torch.no_grad():
            expected = model(ids)
        fleet.stop_worker()
    with jobs.clean_facade():
        fleet.init()
        infer = fleet.DistributedInfer(made())
        infer.init_distributed_infer_env(dirname=str(tmp_path / "model"))
        found = infer.predict(ids)
        assert set(num_rows()) >= {"0"}
        fleet.stop_worker()
    torch.testing.assert_close(found, expected)


def test_it_runs_as_a_script_without_a_fleet(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    with Forked([sys.executable, SCRIPT, "local", str(tmp_path)]) as job:
        assert job.wait() == 0, job.output
    found = pickle.loads((tmp_path / "local-0").read_bytes())
    assert_equal(found["scores"], plain_scores(folder))


# Mistakes


def test_before_init_it_says_what_to_call(tmp_path: Path) -> None:
    with jobs.clean_facade(), pytest.raises(FleetError, match=r"fleet\.init\(\)"):
        fleet.DistributedInfer(Net()).init_distributed_infer_env(dirname=str(tmp_path))


def test_a_job_of_its_own_needs_a_folder() -> None:
    with jobs.clean_facade():
        fleet.init()
        with pytest.raises(FleetError, match="model"):
            fleet.DistributedInfer(Net()).init_distributed_infer_env()


def test_a_folder_after_training_is_refused(tmp_path: Path) -> None:
    with slotted.job(Net(), make_optimizer) as part, pytest.raises(FleetError, match="dirname"):
        fleet.DistributedInfer(part.model).init_distributed_infer_env(dirname=str(tmp_path))


@pytest.mark.parametrize("folder", ["missing", "empty", "a file"])
def test_a_folder_without_a_model_is_named(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").write_text("nothing")
    with jobs.clean_facade():
        fleet.init()
        with pytest.raises(CheckpointError, match=folder):
            fleet.DistributedInfer(Net()).init_distributed_infer_env(dirname=str(tmp_path / folder))


def test_a_model_of_another_shape_is_refused_with_the_names(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    wider = Net()
    wider.users = fleet.nn.SparseEmbedding(6, name="users")
    with jobs.clean_facade():
        fleet.init()
        with pytest.raises(FleetError, match="users"):
            fleet.DistributedInfer(wider).init_distributed_infer_env(dirname=str(folder))
    other = Net()
    other.out = torch.nn.Linear(12, 3)
    with jobs.clean_facade():
        fleet.init()
        with pytest.raises(FleetError, match=r"out\.weight"):
            fleet.DistributedInfer(other).init_distributed_infer_env(dirname=str(folder))


class Pair(torch.nn.Module):
    """Two layers of one size, in this order or the other."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("b")(torch.tanh(self.get_submodule("a")(x)))


@pytest.mark.parametrize("predicts", [True, False], ids=["to predict", "to go on training"])
def test_parameters_are_found_by_name_and_not_by_place(tmp_path: Path, predicts: bool) -> None:
    """A model whose layers are declared in another order is the same model."""
    folder, x = str(tmp_path / "model"), torch.randn(5, 2)
    first = Pair("ab")
    with slotted.job(first, num_servers=2):
        fleet.save_persistables(folder)
    expected = first(x).detach()
    assert_equal([fleet.load_inference_model(folder, Pair("ba"))(x)], [expected])
    with jobs.clean_facade():
        fleet.init()
        model = Pair("ba")
        if predicts:
            fleet.DistributedInfer(model).init_distributed_infer_env(dirname=folder)
        else:
            fleet.distributed_optimizer(jobs.sgd(fleet.distributed_model(model)))
            fleet.init_worker(folder)
        found = model(x).detach()
        fleet.stop_worker()
    assert_equal([found], [expected])


def test_a_model_with_a_table_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    more = Net()
    more.cities = fleet.nn.SparseEmbedding(2, name="cities")
    with jobs.clean_facade():
        fleet.init()
        with pytest.raises(FleetError, match="cities"):
            fleet.DistributedInfer(more).init_distributed_infer_env(dirname=str(folder))


@pytest.mark.parametrize("copied", [False, True], ids=["a new one", "a copy from before"])
def test_after_training_another_model_than_the_trained_one_is_refused(copied: bool) -> None:
    """It would predict with whatever it was made with."""
    before = torch.nn.Sequential(torch.nn.Linear(3, 2))
    other = copy.deepcopy(before) if copied else Net()
    with slotted.job(before) as part:
        loss = part.model(torch.ones(1, 3)).sum()
        loss.backward()
        part.optimizer.step()
        with pytest.raises((FleetError, ModelError), match="model"):
            fleet.DistributedInfer(other).init_distributed_infer_env()


def test_before_a_job_another_model_than_the_distributed_one_is_refused(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    with jobs.clean_facade():
        fleet.init()
        fleet.distributed_model(Net())
        infer = fleet.DistributedInfer(Net())
        with pytest.raises((FleetError, ModelError), match="model"):
            infer.init_distributed_infer_env(dirname=str(folder))


def test_predicting_before_it_is_ready_is_an_error() -> None:
    with jobs.clean_facade():
        fleet.init()
        with pytest.raises(FleetError):
            fleet.DistributedInfer(fleet.distributed_model(Net())).predict(test_batches()[0])


def test_making_ready_twice_says_so_and_not_that_something_was_trained(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    with jobs.clean_facade():
        fleet.init()
        infer = fleet.DistributedInfer(Net())
        infer.init_distributed_infer_env(dirname=str(folder))
        expected = infer.predict(test_batches()[0])
        with pytest.raises(FleetError) as error:
            infer.init_distributed_infer_env(dirname=str(folder))
        assert "trained" not in str(error.value)
        assert torch.equal(infer.predict(test_batches()[0]), expected)
        fleet.stop_worker()


@pytest.mark.slow
def test_a_wrong_folder_ends_the_whole_job_and_is_named(tmp_path: Path) -> None:
    with forked_fleetrun(
        tmp_path / "log", "--server_num", "1", "--worker_num", "1", SCRIPT, "predict", str(tmp_path)
    ) as job:
        assert job.wait() != 0
    assert f"{tmp_path}/model" in (tmp_path / "log" / "latest" / "serverlog.0").read_text()


def test_names_that_were_not_saved_are_an_error(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    with jobs.clean_facade():
        fleet.init()
        with pytest.raises(FleetError, match="nobody"):
            fleet.DistributedInfer(Net()).init_distributed_infer_env(dirname=str(folder), var_names=["nobody"])


def test_what_it_returns_is_what_the_model_returns(tmp_path: Path) -> None:
    """Keywords, several arguments, any structure."""

    class Odd(Net):
        def forward(self, batch: Any, times: int = 1, *, shift: float = 0.0) -> Any:
            return {"scores": super().forward(batch) * times + shift, "note": "odd"}

    folder = saved_model(tmp_path / "model")
    with jobs.clean_facade():
        fleet.init()
        infer = fleet.DistributedInfer(Odd())
        infer.init_distributed_infer_env(dirname=str(folder))
        found = infer.predict(test_batches()[0], 2, shift=1.0)
        fleet.stop_worker()
    assert found["note"] == "odd"
    assert_equal([(found["scores"] - 1) / 2], plain_scores(folder)[:1])


def test_policies_of_training_do_not_act_while_nobody_trains() -> None:
    """Rows that are not trained on are unseen: a schedule would drop them from under the predictions."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shrink = fleet.Shrink(delete_after_unseen_days=1, every_hours=24)
            self.ids = fleet.nn.SparseEmbedding(2, name="ids", entry=fleet.CountFilterEntry(2), shrink=shrink)

    with jobs.clean_facade():
        fleet.init()
        fleet.distributed_model(Model())
        job = current_job.get_job()
        job.distribute_for_prediction()
        spec = job.plan.sparse["ids"].spec
        assert (spec.entry, spec.shrink) == (AdmissionEntry(), Shrink())
