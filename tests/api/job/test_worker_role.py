"""A worker's network after a barrier, after a flush and in predictions; and what its last save has: in every mode."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import jobs
from support.jobs import Net, Part, fleet_optimizer

import torchfleet as fleet
from torchfleet.api.job import worker_saves
from torchfleet.base.errors import FleetError
from torchfleet.ps.worker.model_saving import Kind

SGD = fleet_optimizer("sgd", lr=0.05)
CASES = {
    "sync": {"mode": "sync"},
    "half_async": {"mode": "half_async"},
    "gathered": {"mode": "half_async", "gather": 2},
    "async": {"mode": "async", "max_staleness": 0},
    "receiver thread": {"mode": "async", "max_staleness": 0, "independent_recv_thread": True},
    "bounded": {"mode": "async", "max_staleness": 9},
    "geo": {"mode": "geo", "k_steps": 2},
}
BATCH = jobs.make_batch(77, 32)


def train(part: Part, num: int) -> None:
    for batch in jobs.worker_batches(part.index, num):
        part.step(batch)


def called(part: Part) -> torch.Tensor:
    return part.model(BATCH).detach()


def without_gradients(part: Part) -> torch.Tensor:
    with torch.no_grad():
        return called(part)


def in_eval_mode(part: Part) -> torch.Tensor:
    part.model.eval()
    out = called(part)
    part.model.train()
    return out


def after_flush(part: Part) -> torch.Tensor:
    part.flush()
    return called(part) if part.worker.strategy.mode != "geo" else without_gradients(part)


def predicted_by(saved: Path) -> torch.Tensor:
    with torch.no_grad():
        return fleet.load_inference_model(str(saved), Net())(BATCH)


@pytest.mark.parametrize("case", CASES)
def test_after_a_barrier_all_workers_predict_with_the_model_that_is_saved(case: str, tmp_path: Path) -> None:
    """Worker 0 has finished when worker 1 begins, where the mode allows it."""
    first_done = threading.Event()

    def body(part: Part) -> torch.Tensor:
        if part.index == 1 and case != "sync":
            assert first_done.wait(jobs.SECONDS)
        train(part, 3 if case == "sync" else 2 + 3 * part.index)
        if part.index == 0 and case != "sync":
            part.worker.communicator.rest()
            first_done.set()
        part.barrier()
        out = without_gradients(part)
        if part.index == 0:
            part.worker.save(str(tmp_path), "full")
        part.worker._wait_for_all("the end of a test")
        return out

    done = jobs.run(body, Net, SGD, num_workers=2, num_servers=2, **CASES[case])
    for out in done.results:
        torch.testing.assert_close(out, predicted_by(tmp_path), rtol=0, atol=2e-6)


@pytest.mark.parametrize("look", [after_flush, in_eval_mode, without_gradients])
@pytest.mark.parametrize("case", [case for case in CASES if case != "sync"])
def test_a_worker_that_has_finished_predicts_with_the_servers_network(
    case: str, look: Callable[[Part], torch.Tensor], tmp_path: Path
) -> None:
    first_done, all_done, is_saved = threading.Event(), threading.Event(), threading.Event()

    def body(part: Part) -> torch.Tensor:
        if part.index == 1:
            assert first_done.wait(jobs.SECONDS)
        train(part, 2 + 3 * part.index)
        part.flush()
        if part.index == 1:
            all_done.set()
            assert is_saved.wait(jobs.SECONDS)
        else:
            first_done.set()
            assert all_done.wait(jobs.SECONDS)
        out = look(part)
        if part.index == 0:
            part.worker.save(str(tmp_path), "full")
            is_saved.set()
        part.worker._wait_for_all("the end of a test")  # in geo mode a worker that stops sends what is left over
        return out

    done = jobs.run(body, Net, SGD, num_workers=2, num_servers=2, **CASES[case])
    for out in done.results:
        torch.testing.assert_close(out, predicted_by(tmp_path), rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_a_prediction_between_forward_and_backward_leaves_the_graph_usable(mode: str) -> None:
    def body(part: Part) -> None:
        for batch in jobs.worker_batches(part.index, 3):
            out = part.model(batch)
            target = without_gradients(part).mean()
            part.optimizer.zero_grad()
            target = target + in_eval_mode(part).mean()
            (out - target).square().mean().backward()
            part.optimizer.step()

    jobs.run(body, Net, SGD, mode=mode, num_workers=2)


def test_a_prediction_changes_nothing_of_geo_training() -> None:
    """One worker, whose differences are sent after 100 steps and before a prediction: its copy is that of plain SGD."""

    def result(is_looked: bool) -> dict[str, torch.Tensor]:
        def body(part: Part) -> None:
            for batch in jobs.worker_batches(0, 6):
                part.step(batch)
                if is_looked:
                    without_gradients(part)

        return jobs.run(body, Net, SGD, mode="geo", k_steps=100).values(items=jobs.NUM_ITEMS // 2)

    jobs.assert_equal_values(result(True), result(False), 1e-6)


STEPS = (4, 9, 2)
# Steps before the save, for which the workers then wait. In "bounded" mode nobody may get further ahead of worker 2,
# which waits, than max_staleness, 9: all steps of the others are fewer, in whatever order they come.
BEFORE = (4, 4, 1)


@pytest.mark.parametrize("case", CASES)
def test_the_last_save_of_a_worker_that_ends_first_has_all_steps(case: str, tmp_path: Path) -> None:
    """The other workers' last steps come after worker 0 has saved."""
    is_saved = threading.Event()

    def body(part: Part) -> list[str]:
        for number, batch in enumerate(jobs.worker_batches(part.index, STEPS[part.index])):
            if number == BEFORE[part.index] and (part.index == 1 or case != "sync"):
                assert is_saved.wait(jobs.SECONDS)
            part.step(batch)
        if part.index:
            return []
        part.worker.save(str(tmp_path), "full", {"from": 0})
        is_saved.set()
        return part.worker.complete_saves()

    done = jobs.run(body, Net, SGD, num_workers=3, num_servers=2, **CASES[case])
    assert done.results[0] == [str(tmp_path)]
    assert fleet.saved_extra(str(tmp_path)) == {"from": 0}
    saved = fleet.load_inference_model(str(tmp_path), Net())
    held = torch.cat([torch.from_numpy(done.servers.table("dense.0", i).whole().reshape(-1)) for i in range(2)])
    network = [*saved.hidden.parameters(), *saved.out.parameters()]
    found = torch.cat([p.detach().reshape(-1) for p in network])
    torch.testing.assert_close(found, held, rtol=0, atol=1e-6)  # geo's differences are rounded
    rows = saved.items(torch.arange(1, jobs.NUM_ITEMS // 2)).detach()
    torch.testing.assert_close(rows, done.rows("items", jobs.NUM_ITEMS // 2)[1:], rtol=0, atol=1e-6)


def test_what_others_push_while_a_save_is_written_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_written, is_pushed, save_model = threading.Event(), threading.Event(), worker_saves.save_model

    def save_and_wait(*args: Any, **kwargs: Any) -> Any:
        saved = save_model(*args, **kwargs)
        is_written.set()
        assert is_pushed.wait(jobs.SECONDS)
        return saved

    monkeypatch.setattr(worker_saves, "save_model", save_and_wait)

    def body(part: Part) -> list[str]:
        first, last = jobs.worker_batches(part.index, 2)
        part.step(first)
        if part.index:
            assert is_written.wait(jobs.SECONDS)
            part.step(last)
            part.flush()
            is_pushed.set()
            return []
        part.worker.save(str(tmp_path), "full")
        return part.worker.complete_saves()

    done = jobs.run(body, Net, SGD, mode="half_async", num_workers=2)
    assert done.results[0] == [str(tmp_path)]
    saved = fleet.load_inference_model(str(tmp_path), Net())
    rows = saved.items(torch.arange(1, jobs.NUM_ITEMS // 2)).detach()
    torch.testing.assert_close(rows, done.rows("items", jobs.NUM_ITEMS // 2)[1:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["sync", "async", "half_async"])
def test_a_save_between_steps_waits_for_no_worker_and_one_after_a_barrier_is_made_once(
    mode: str, tmp_path: Path
) -> None:
    def body(part: Part) -> list[str]:
        for number, batch in enumerate(jobs.worker_batches(part.index, 4)):
            part.step(batch)
            if part.index == 0 and number < 3:
                part.worker.save(str(tmp_path / "between"), "full")
        assert part.worker.complete_saves() == []  # a step was made since
        part.barrier()
        if part.index:
            return []
        part.worker.save(str(tmp_path / "end"), "full")
        return part.worker.complete_saves()

    assert jobs.run(body, Net, SGD, mode=mode, num_workers=2).results == [[], []]


SAVES = {
    "a delta, then another folder": [("chain", "full"), ("chain", "delta"), ("final", "full")],
    "a delta of the newest chain": [("first", "full"), ("chain", "full"), ("chain", "delta"), ("net", "inference")],
    "two chains": [("chain", "full"), ("chain", "delta"), ("final", "full"), ("final", "delta")],
}


@pytest.mark.parametrize("saves", SAVES.values(), ids=SAVES)
def test_the_newest_save_of_each_folder_is_repeated_at_the_end(saves: list[tuple[str, Kind]], tmp_path: Path) -> None:
    is_saved = threading.Event()

    def body(part: Part) -> list[str]:
        train(part, 1)
        if part.index:
            assert is_saved.wait(jobs.SECONDS)
            train(part, 2)
            return []
        for name, kind in saves:
            part.worker.save(str(tmp_path / name), kind)
        is_saved.set()
        return part.worker.complete_saves()

    done = jobs.run(body, Net, SGD, mode="half_async", num_workers=2, num_servers=2)
    folders = {str(tmp_path / name) for name, _ in saves}
    assert set(done.results[0]) == folders
    held = done.rows("items", jobs.NUM_ITEMS // 2)[1:]
    for folder in folders:
        saved = fleet.load_inference_model(folder, Net())
        assert torch.equal(saved.items(torch.arange(1, jobs.NUM_ITEMS // 2)).detach(), held), folder


def test_a_save_that_fails_at_the_end_skips_no_other(tmp_path: Path) -> None:
    is_saved = threading.Event()

    def body(part: Part) -> None:
        train(part, 1)
        if part.index:
            assert is_saved.wait(jobs.SECONDS)
            train(part, 2)
            return
        for name in ("first", "last"):
            part.worker.save(str(tmp_path / name), "full")
        shutil.rmtree(tmp_path / "first")
        (tmp_path / "first").write_text("")  # no folder can be made there
        is_saved.set()
        with pytest.raises((OSError, FleetError)):
            part.worker.complete_saves()

    done = jobs.run(body, Net, SGD, mode="half_async", num_workers=2)
    saved = fleet.load_inference_model(str(tmp_path / "last"), Net())
    held = done.rows("items", jobs.NUM_ITEMS // 2)[1:]
    assert torch.equal(saved.items(torch.arange(1, jobs.NUM_ITEMS // 2)).detach(), held)


def test_a_last_save_that_is_a_delta_is_followed_by_another(tmp_path: Path) -> None:
    is_saved = threading.Event()

    def body(part: Part) -> None:
        train(part, 1)
        if part.index:
            assert is_saved.wait(jobs.SECONDS)
            train(part, 2)
            return
        part.worker.save(str(tmp_path), "full")
        part.worker.save(str(tmp_path), "delta")
        is_saved.set()
        assert part.worker.complete_saves() == [str(tmp_path)]

    done = jobs.run(body, Net, SGD, mode="half_async", num_workers=2)
    ids = torch.arange(1, jobs.NUM_ITEMS // 2)
    saved = fleet.load_inference_model(str(tmp_path), Net())
    assert torch.equal(saved.items(ids).detach(), done.rows("items", jobs.NUM_ITEMS // 2)[1:])
