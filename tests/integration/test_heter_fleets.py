"""Whole jobs with heter workers: against one process, and with a heter worker that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from support.messages import lines_naming
from support.paths import SCRIPTS
from support.scripts import heter_job
from support.scripts.gates import close_gates, open_gate
from support.scripts.launching import Started, forked_fleetrun, run_dir

import torchfleet as fleet

pytestmark = pytest.mark.slow

SCRIPT = str(SCRIPTS / "heter_job.py")
TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join((str(TESTS.parent), str(TESTS)))
GATE = 15  # the step before which workers wait for a kill


def job(folder: Path, counts: str, *arguments: str, options: tuple[str, ...] = ()) -> Started:
    """Servers, workers and heter workers; the script writes its result into the folder."""
    named = zip(("--server_num", "--worker_num", "--heter_worker_num"), counts.split(), strict=True)
    flags = [word for pair in named for word in pair]
    result = ("--result", str(folder / "result.npz"))
    return forked_fleetrun(folder, *flags, *options, SCRIPT, *arguments, *result, PYTHONPATH=PATHS)


def kill_heter_worker(started: Started, folder: Path) -> None:
    """After a few steps, and before the gate."""
    started.wait_for("worker 0 has made step 5")
    os.kill(started.pid("HETER_WORKER", 0), signal.SIGKILL)
    open_gate(folder, GATE)


def result_of(started: Started, folder: Path) -> dict[str, np.ndarray]:
    assert started.wait() == 0, started.output
    return dict(np.load(folder / "result.npz"))


def in_one_process(*arguments: str) -> dict[str, np.ndarray]:
    fleet.reset()
    return heter_job.train(heter_job.options_of(list(arguments)))


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def test_one_worker_and_a_heter_worker_equal_one_process(tmp_path: Path) -> None:
    with job(tmp_path, "1 1 1", "--steps", "12") as started:
        found = result_of(started, tmp_path)
        assert "'passes': 12, 'repeated': 0, 'moves': 0" in started.output
    assert_same(found, in_one_process("--steps", "12"))
    log = (run_dir(tmp_path) / "heterlog.0").read_text()
    assert lines_naming(log, "listening", "'tower'", "cpu")
    assert lines_naming(log, "stopped", "passes")


def test_a_killed_heter_worker_of_two_changes_nothing(tmp_path: Path) -> None:
    """Two workers in sync mode; one process trains on both batches."""
    close_gates(tmp_path, GATE)
    with job(tmp_path, "1 2 2", "--steps", "30", "--pause", "0.05", "--gates", str(tmp_path)) as started:
        kill_heter_worker(started, tmp_path)
        found = result_of(started, tmp_path)
        assert lines_naming(started.output, "heter_worker 0", "SIGKILL", "again")
        logs = [(run_dir(tmp_path) / f"workerlog.{i}").read_text() for i in range(2)]
        assert any(lines_naming(log, "heter worker 0", "lost") for log in logs)
    expected = in_one_process("--steps", "30", "--combined", "2")
    assert found["updates"] == 30
    assert_same(found, expected)


def test_the_only_heter_worker_is_replaced_and_async_training_goes_on(tmp_path: Path) -> None:
    close_gates(tmp_path, GATE)
    options = ("--steps", "30", "--pause", "0.02", "--mode", "async", "--gates", str(tmp_path))
    with job(tmp_path, "1 2 1", *options) as started:
        kill_heter_worker(started, tmp_path)
        assert result_of(started, tmp_path)["updates"] == 60
        assert lines_naming(started.output, "heter_worker 0", "SIGKILL", "again")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["--unguarded"], ("ModelError", "device_guard('gpu')")), (["--mode", "hybrid"], ("StrategyError", "hybrid"))],
)
def test_a_job_that_cannot_have_heter_workers_says_so(
    tmp_path: Path, arguments: list[str], error: tuple[str, ...]
) -> None:
    with job(tmp_path, "1 1 1", *arguments) as started:
        assert started.wait() == 1
        assert lines_naming(started.output, *error, "--heter_worker_num")


def test_a_heter_worker_that_does_not_serve_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torchfleet as fleet\nfleet.init()\nif not fleet.is_heter_worker():\n    time.sleep(99)\n"
    )
    flags = ("--server_num", "1", "--worker_num", "1", "--heter_worker_num", "1")
    with forked_fleetrun(tmp_path, *flags, str(script), PYTHONPATH=PATHS) as started:
        assert started.wait() == 1
        assert lines_naming(started.output, "heter_worker 0", "exit status 0")
