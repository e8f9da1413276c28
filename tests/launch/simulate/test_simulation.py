"""Whole jobs in virtual time: the same results as real ones, the same history twice, and clear ends."""

from __future__ import annotations

import ast
import itertools
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import lines_naming
from support.scripts import virtual_job
from support.scripts.launching import forked_fleetrun, run_dir

from torchfleet.launch.simulate import forks
from torchfleet.launch.simulate.conditions import Conditions

SCRIPT = virtual_job.__file__


def run(log_dir: Path, workers: int, *arguments: str, status: int = 0) -> str:
    """The output of fleetrun with two servers."""
    counts = ("--server_num", "2", "--worker_num", str(workers))
    with forked_fleetrun(log_dir, *counts, *arguments) as job:
        assert job.wait() == status, job.output
        return job.output


def test_all_kernels_are_compiled_before_servers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each simulated server would start a process that compiles them."""
    called: list[str] = []
    for name in ("compile_all", "warm_up"):
        monkeypatch.setattr(forks, name, lambda name=name: called.append(name))
    monkeypatch.setattr(forks.gc, "freeze", lambda: None)
    num_threads = torch.get_num_threads()
    try:
        forks.prepare()
    finally:
        torch.set_num_threads(num_threads)
    assert called == ["compile_all", "warm_up"]


def worker_logs(log_dir: Path, workers: int) -> list[list[str]]:
    return [re.findall(r"loss (\S+)", (run_dir(log_dir) / f"workerlog.{i}").read_text()) for i in range(workers)]


def history(log_dir: Path, workers: int, *arguments: str) -> tuple[dict[str, Any], list[list[str]]]:
    """The figures of a simulation without its real time, and what its workers wrote of losses and times."""
    run(log_dir, workers, *arguments)
    folder = run_dir(log_dir)
    figures = json.loads((folder / "simulation.json").read_text())
    del figures["wall_seconds"]
    return figures, [re.findall(r"loss .*|steps in .*", log.read_text()) for log in sorted(folder.glob("workerlog.*"))]


def test_sync_training_is_bit_for_bit_that_of_real_processes(tmp_path: Path) -> None:
    run(tmp_path / "real", 3, SCRIPT, "train")
    run(tmp_path / "virtual", 3, "--simulate", SCRIPT, "train")
    losses = worker_logs(tmp_path / "virtual", 3)
    assert [len(log) for log in losses] == [6, 6, 6]
    assert losses == worker_logs(tmp_path / "real", 3)


@pytest.mark.long
def test_given_times_make_the_same_history_twice_and_queues_tell_it_ahead(tmp_path: Path) -> None:
    options = ("--simulate", "--step_ms", "5", "--straggler", "0.1x2", SCRIPT, "train", "--mode", "async")
    options += ("--max_staleness", "0")  # the queues know no bound
    # A message that holds a pid would be longer by the second of them, and take longer.
    figures, logs = history(tmp_path / "one", 16, *options, "--steps", "12", "--pid", "900")
    assert history(tmp_path / "two", 16, *options, "--steps", "12", "--pid", "70000") == (figures, logs)
    fastest = 14 / 0.005 + 2 / 0.01  # if nothing else took any time
    assert 0.8 * fastest < figures["steps_per_s"] <= fastest
    assert figures["staleness"]["words"] > 8
    queues, _ = history(tmp_path / "queues", 16, "--throughput_only", *options, "--steps", "30")
    assert queues["steps_per_s"] == pytest.approx(figures["steps_per_s"], rel=0.1)
    assert queues["staleness"]["all tables"] == pytest.approx(figures["staleness"]["words"], rel=0.25)
    seconds = sorted(float(log[-1].split()[2]) for log in logs)
    # Computing, and waits for the network's values behind 15 other workers: at most a third of a step.
    assert 12 * 0.005 <= seconds[0] <= 12 * 0.005 * 4 / 3
    assert 12 * 0.01 <= seconds[-1] <= 12 * 0.01 * 4 / 3


def test_hybrid_steps_take_the_time_of_the_slowest_worker(tmp_path: Path) -> None:
    times = ("--simulate", "--step_ms", "20", "--straggler", "0.5x3")
    figures, _ = history(tmp_path, 2, *times, SCRIPT, "train", "--mode", "hybrid")
    fastest = 2 / (3 * 0.02)  # if nothing else took any time
    assert 0.9 * fastest < figures["steps_per_s"] <= fastest
    figures, _ = history(tmp_path, 2, "--simulate", "--compute_scale", "100", SCRIPT, "train", "--mode", "hybrid")
    assert figures["steps_per_s"] < 2 / (100 * 0.0002)  # no processor makes such a step in 0.2 ms


def test_with_jitter_a_hybrid_step_takes_the_time_of_the_slowest_worker_of_that_step(tmp_path: Path) -> None:
    times = ("--simulate", "--step_ms", "20", "--jitter", "0.5")
    figures, _ = history(tmp_path, 2, *times, SCRIPT, "train", "--mode", "hybrid", "--steps", "20")
    drawn = [itertools.islice(Conditions(jitter=0.5).step_factors(worker), 19) for worker in range(2)]
    slowest = [max(both) for both in zip(*drawn, strict=True)][2:]  # rates begin after three steps
    fastest = 2 / (0.02 * sum(slowest) / len(slowest))
    assert 0.9 * fastest < figures["steps_per_s"] <= fastest


def test_data_parallel_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    output = run(tmp_path, 3, "--simulate", SCRIPT, "reduce")
    assert "sum 3.0 all [0.0, 10.0, 20.0]" in output
    torch.manual_seed(0)
    alone = virtual_job.network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in virtual_job.batches(3):
        alone(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = ast.literal_eval(re.search(r"weights (\[.*\])", output)[1])
    expected = [weight for parameter in alone.parameters() for weight in parameter.flatten().tolist()]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


def test_waits_of_threads_end_in_virtual_time(tmp_path: Path) -> None:
    output = run(tmp_path, 1, "--simulate", "--step_ms", "1", SCRIPT, "threads")
    assert ast.literal_eval(re.search(r"\{.*\}", output)[0]) == {
        "time-out": 0.25, "first": 0.5, "second": 1.0, "producer": 1.5, "pool": 2.0, "join": 2.0, "lock": 2.1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("train", "--fail", "error"), ("worker 1 ended with exit status 1", "RuntimeError: this worker was told")),
        (("train", "--fail", "kill"), ("worker 1 was killed",)),
        (
            ("deadlock",),
            ("deadlock at 0.", "worker 0: main waits for a lock", "worker 1: main waits for the other rank"),
        ),
    ],
)
def test_a_job_that_cannot_end_well_says_why(
    tmp_path: Path, arguments: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    output = run(tmp_path, 2, "--simulate", SCRIPT, *arguments, status=1)
    for text in texts:
        assert text in output


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    counts = ("--server_num", "1", "--worker_num", "2")
    with forked_fleetrun(tmp_path, *counts, "--simulate", SCRIPT, "train", "--fail", "wait") as job:
        job.wait_for("[worker 0] loss")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT
        assert lines_naming(job.output, "SIGINT", 3)
