"""fleet.metrics and fleet.util among workers that are processes: against a plain computation on all workers' data, the
same on all of them, mistakes that everybody hears of, and a worker that has left.

One job of two workers and one of three runs all cases (scripts/meeting.py); the tests look at what they wrote."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extras import Late
from support.jobs import clean_facade
from support.messages import naming
from support.scripts import meeting
from support.scripts.launching import forked_fleetrun

import torchfleet as fleet
from torchfleet import metrics, util
from torchfleet.base.errors import FleetError

oracle = Late("sklearn.metrics")

pytestmark = pytest.mark.xdist_group("metrics_distributed")  # its fixtures are made once

SCRIPT = str(Path(meeting.__file__))
REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}
BROUGHT = list(meeting.numbers(0))
Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[3], ids="{} workers".format)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each worker found."""
    folder = tmp_path_factory.mktemp("meeting")
    counts = ("--server_num", "1", "--worker_num", str(request.param))
    with forked_fleetrun(folder / "log", *counts, SCRIPT, str(folder)) as job:
        assert job.wait() == 0, job.output
    return [pickle.loads((folder / f"worker-{i}").read_bytes()) for i in range(request.param)] + [
        pickle.loads((folder / "server-0").read_bytes())
    ]


def values(found: Found, case: str) -> list[Any]:
    """What the case returned on each worker."""
    workers = [worker[case] for worker in found[:-1]]
    assert [worker[0] for worker in workers] == ["ok"] * len(workers), workers
    return [worker[1] for worker in workers]


def errors(found: Found, case: str) -> list[str]:
    """The errors on each worker, which must all be ours, and must have come before the time was up."""
    workers = [worker[case] for worker in found[:-1]]
    assert all(worker[0] == "error" and worker[1] for worker in workers), workers
    texts = [worker[2] for worker in workers]
    assert not any("waiting" in text for text in texts), texts
    return texts


def array_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float64 if value.is_floating_point() else value.dtype).numpy()
    return np.asarray(value)


def combined(mode: str, kind: str, num_workers: int) -> Any:
    parts = [array_of(meeting.numbers(worker)[kind]) for worker in range(num_workers)]
    total = parts[0]
    for part in parts[1:]:
        total = REDUCE[mode](total, part)
    return total


def close_to(kind: str) -> dict[str, float]:
    """Numbers of fewer digits are rounded to them, once per worker."""
    narrow = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2, "tensor": 1e-6, "numpy": 1e-6}
    return {
        "rtol": narrow.get(kind.split(maxsplit=1)[0], 1e-14),
        "atol": narrow.get(kind.split(maxsplit=1)[0], 1e-14) / 10,
    }


def assert_same_bits(results: list[Any]) -> None:
    for result in results[1:]:
        assert type(result) is type(results[0])
        if isinstance(result, torch.Tensor):
            assert result.dtype == results[0].dtype
            assert torch.equal(result.nan_to_num(123.0), results[0].nan_to_num(123.0))
        else:
            np.testing.assert_array_equal(result, results[0])


# Sums, maxima, minima


@pytest.mark.parametrize("kind", [kind for kind in BROUGHT if kind != "bool"])
@pytest.mark.parametrize("mode", REDUCE)
def test_all_reduce_equals_a_plain_computation_and_keeps_kind_and_shape(found: Found, mode: str, kind: str) -> None:
    results = values(found, f"all_reduce {mode} {kind}")
    assert_same_bits(results)
    result, given = results[0], meeting.numbers(0)[kind]
    np.testing.assert_allclose(array_of(result), combined(mode, kind, len(results)), **close_to(kind))
    if isinstance(given, (torch.Tensor, np.ndarray)):
        assert type(result) is type(given)
        assert result.dtype == given.dtype
        assert result.shape == given.shape
    elif isinstance(given, list):
        assert isinstance(result, list)
    else:
        assert isinstance(result, int if isinstance(given, int) else float)


def test_a_sum_of_yes_and_no_is_a_count_or_an_error(found: Found) -> None:
    """numpy's sum of two booleans is their `or`, which a user who asks for a sum does not expect."""
    for worker in found[:-1]:
        what, value, *_ = worker["all_reduce sum bool"]
        assert value == (True if what == "error" else 2)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_maximum_and_minimum_of_yes_and_no(found: Found, mode: str) -> None:
    num = len(found) - 1
    assert values(found, f"all_reduce {mode} bool") == [mode == "max" or num == 2] * num


@pytest.mark.parametrize("kind", BROUGHT)
@pytest.mark.parametrize("mode", REDUCE)
def test_metrics_reductions_equal_a_plain_computation(found: Found, mode: str, kind: str) -> None:
    results = values(found, f"metrics {mode} {kind}")
    assert_same_bits(results)
    result, given = results[0], meeting.numbers(0)[kind]
    expected = combined(mode, kind, len(results))
    expected = expected if kind != "bool" else {"sum": 2, "max": 1, "min": len(results) == 2}[mode]
    np.testing.assert_allclose(array_of(result).astype(np.float64), expected, **close_to(kind))
    assert np.shape(result) == np.shape(given)
    if isinstance(given, torch.Tensor):
        assert isinstance(result, torch.Tensor)
        if given.is_floating_point():
            assert result.dtype == given.dtype
    elif isinstance(given, (np.ndarray, list)):
        assert isinstance(result, np.ndarray)
    else:
        assert isinstance(result, (int, float))


# Metrics


def everybodys(num_workers: int) -> list[Any]:
    """(logits, labels, predictions) of all workers."""
    return [np.concatenate(column) for column in zip(*map(meeting.samples, range(num_workers)), strict=True)]


@pytest.mark.parametrize("case", ["auc", "auc of tensors"])
def test_the_area_is_that_of_all_workers_samples(found: Found, case: str) -> None:
    results = values(found, case)
    logits, labels, _ = everybodys(len(results))
    assert results == [pytest.approx(oracle.roc_auc_score(labels, logits), abs=1e-4)] * len(results)
    assert len(set(results)) == 1
    binned = np.floor(4095 / (1 + np.exp(-logits)))
    assert results[0] == pytest.approx(oracle.roc_auc_score(labels, binned), abs=1e-12)


@pytest.mark.parametrize("case", ["acc", "acc of arrays", "acc of tensors"])
def test_the_accuracy_is_that_of_all_workers_samples(found: Found, case: str) -> None:
    results = values(found, case)
    logits, labels, _ = everybodys(len(results))
    assert results == [pytest.approx(oracle.accuracy_score(labels, logits > 0), rel=1e-12)] * len(results)
    assert len(set(results)) == 1


def test_the_errors_are_those_of_all_workers_samples(found: Found) -> None:
    num = len(found) - 1
    logits, _, predicted = everybodys(num)
    squared = oracle.mean_squared_error(logits, predicted)
    expected = {"mae": oracle.mean_absolute_error(logits, predicted), "mse": squared, "rmse": math.sqrt(squared)}
    for case, value in expected.items():
        results = values(found, case)
        assert results == [pytest.approx(value, rel=1e-12)] * num, case
        assert len(set(results)) == 1
        assert isinstance(results[0], float)


def all_users(num_workers: int) -> Any:
    return np.concatenate([meeting.users(worker) for worker in range(num_workers)])


@pytest.mark.parametrize(("case", "make"), [("hit rate", metrics.HitRate), ("ndcg", metrics.NDCG)])
def test_rankings_are_those_of_all_workers_lists(found: Found, case: str, make: Any) -> None:
    results = values(found, case)
    lists = [np.concatenate(column) for column in zip(*map(meeting.rankings, range(len(results))), strict=True)]
    assert results == [pytest.approx(make(5).update(*lists), abs=1e-12)] * len(results)
    assert len(set(results)) == 1


def test_loss_calibration_and_grouped_area_are_those_of_all_workers_samples(found: Found) -> None:
    num = len(found) - 1
    logits, labels, _ = everybodys(num)
    likely = 1 / (1 + np.exp(-logits))
    assert values(found, "log loss") == [pytest.approx(oracle.log_loss(labels, likely), rel=1e-9)] * num
    for calibrated in values(found, "calibration"):
        assert calibrated.ratio == pytest.approx(likely.sum() / labels.sum(), rel=1e-9)
        assert calibrated.num.sum() == len(labels)
    meter = metrics.GAUC()
    meter.update(logits, labels, all_users(num))
    results = values(found, "gauc")
    assert results == [pytest.approx(meter.compute(), abs=1e-12)] * num
    assert len(set(results)) == 1


def test_popularity_counts_the_occurrences_on_all_workers(found: Found) -> None:
    num = len(found) - 1
    every = all_users(num)
    expected = [np.log((every == item).sum() / len(every)) for item in (0, 1000, 1003)]
    assert values(found, "popularity") == [pytest.approx(expected, abs=1e-5)] * num


def test_in_batch_over_all_workers_has_the_gradients_of_one_process_with_all_samples(found: Found) -> None:
    """The mean of the workers' losses is that of one process."""
    results = values(found, "in_batch")
    parts = [meeting.vectors(worker) for worker in range(len(results))]
    users, items, ids, log_q = (torch.cat([part[column] for part in parts]) for column in range(4))
    leaves = [users.detach().requires_grad_(), items.detach().requires_grad_()]
    loss = torch.nn.functional.cross_entropy(*fleet.data.negatives.in_batch(*leaves, ids, log_q))
    gradients = torch.autograd.grad(loss, leaves)
    assert np.mean([result[0] for result in results]) == pytest.approx(loss.item())
    for place, gradient in enumerate(gradients, 1):
        whole = np.concatenate([result[place] for result in results]) / len(results)
        np.testing.assert_allclose(whole, gradient.numpy(), rtol=1e-9, atol=1e-12)


# Things that are gathered


@pytest.mark.parametrize("kind", meeting.things(0))
def test_all_gather_gives_everybody_what_each_gave_in_order(found: Found, kind: str) -> None:
    results = values(found, f"all_gather {kind}")
    expected = [meeting.things(worker)[kind] for worker in range(len(results))]
    assert [repr(result) for result in results] == [repr(expected)] * len(results)


def test_print_on_rank_prints_on_that_worker_only(found: Found) -> None:
    for rank in (0, 1, 99):
        printed = values(found, f"print_on_rank {rank}")
        assert printed == ["hello\n" if worker == rank else "" for worker in range(len(printed))]


def test_after_all_mistakes_the_workers_are_still_in_step(found: Found) -> None:
    num = len(found) - 1
    assert values(found, "barrier") == [None] * num
    assert values(found, "sum after all mistakes") == [[sum(range(num)), num]] * num


# Mistakes


TEXTS = {
    "all_reduce of other shapes": "all_reduce [3] [4]",
    "all_reduce of as many in other shapes": "all_reduce [2, 3] [3, 2]",
    "all_reduce in other modes": "all_reduce sum max",
    "all_reduce of other kinds": "all_reduce f4 f8",
    "all_reduce in a mode that is none": "mode sum max min 'mean'",
    "all_reduce of text": "all_reduce",
    "all_reduce among servers": "comm_world='server' worker",
    "all_gather among all": "comm_world 'worker' 'server' 'all' 'everybody'",
    "all_gather of an array of text": "all_gather <U1",
    "all_gather of bytes": "all_gather",
    "barrier among servers": "comm_world='server'",
    "sum of other shapes": "fleet.metrics 3 4",
    "sum of as many in other shapes": "fleet.metrics 2, 3 3, 2",
    "sum here and max there": "fleet.metrics sum max",
    "auc of other numbers of bins": "fleet.metrics 9 5",
    "auc of other negatives": "fleet.metrics 9 5",
    "acc without samples": "fleet.metrics.acc",
    "rmse without samples": "fleet.metrics.rmse",
}


def test_every_mistake_has_a_text_to_be_found() -> None:
    assert TEXTS.keys() == meeting.mistakes(0).keys()


@pytest.mark.parametrize("mistake", TEXTS)
def test_a_mistake_is_a_clear_error_on_all_workers(found: Found, mistake: str) -> None:
    for text in errors(found, mistake):
        with pytest.raises(FleetError, match=naming(*TEXTS[mistake].split())):
            raise FleetError(text)


def test_before_init_worker_it_is_an_error_not_this_workers_own_number(found: Found) -> None:
    """A process that is one of several workers is not alone, and neither is a server."""
    for process in found:
        what, is_ours, *_ = process["before init_worker"]
        assert (what, is_ours) == ("error", True)


# A worker that has left


def test_a_worker_that_has_left_is_left_out(found: Found) -> None:
    staying = found[: len(found) - 2]
    num = len(staying)
    logits, labels, _ = everybodys(num)
    for worker in staying:
        assert worker["sum without the one that left"] == ("ok", sum(range(1, num + 1)))
        assert worker["auc without the one that left"] == (
            "ok",
            pytest.approx(oracle.roc_auc_score(labels, logits), abs=1e-4),
        )
        assert worker["gathered without the one that left"] == ("ok", list(range(num)))
        assert worker["barrier without the one that left"] == ("ok", None)


# A process alone


def test_a_process_without_a_fleet_is_alone() -> None:
    with clean_facade():
        assert util.all_reduce(3) == 3
        assert util.all_reduce([1.5], mode="max") == [1.5]
        assert util.all_gather({"a": 1}) == [{"a": 1}]
        assert metrics.sum(np.ones(2)).tolist() == [1, 1]


def test_one_local_worker_gets_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with clean_facade():
        fleet.init()
        model = fleet.distributed_model(torch.nn.Linear(1, 1))
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fleet.init_worker()
        for value in (np.arange(4.0).reshape(2, 2), torch.arange(3)):
            for mode in REDUCE:
                assert_same_bits([util.all_reduce(value, mode=mode), value])
        assert metrics.auc([0, 2], [2, 0]) == 1.0
        assert util.all_gather("me") == ["me"]
        util.barrier()
        assert util.get_file_shard(["b", "a"]) == ["b", "a"]
        capsys.readouterr()
        util.print_on_rank("hello", 0)
        util.print_on_rank("nobody", 1)
        assert capsys.readouterr().out == "hello\n"
        fleet.stop_worker()


def test_what_is_too_much_for_the_servers_is_an_error_in_numbers() -> None:
    with clean_facade():
        fleet.init()
        model = fleet.distributed_model(torch.nn.Linear(1, 1))
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fleet.init_worker()
        with pytest.raises(FleetError, match=naming("16,777,216")):
            util.all_reduce(np.zeros(1 << 22))
        assert util.all_reduce(2) == 2
        fleet.stop_worker()
