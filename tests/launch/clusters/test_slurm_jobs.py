"""Jobs on a real Slurm of four nodes, on this machine: `make test-clusters`."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.messages import lines_naming
from support.own_slurm import Slurm, started_slurm
from support.paths import ROOT, SCRIPTS
from support.scripts.launching import TINY, forked_fleetrun, in_log, wait_until

from torchfleet.base.monitor.stop_request import REQUEUE
from torchfleet.launch.cli import main
from torchfleet.observe.commands.diff import diff

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(600)]
EXAMPLE = ROOT / "examples" / "ctr_dnn"
FLEETRUN = [sys.executable, "-m", "torchfleet.launch", "--cluster", "slurm"]
START = 300.0  # seconds for eight processes on a machine that may have other things to do


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with started_slurm(num_nodes=4) as made:
        yield made


@pytest.fixture(scope="module")
def data(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    slurm.run(
        [sys.executable, str(EXAMPLE / "prepare.py"), "--rows", "2000", "--parts", "4", "--out", str(folder)], folder
    )
    return folder


def submitted(slurm: Slurm, folder: Path, *options: str) -> str:
    """The number of a job whose file `fleetrun slurm` has written."""
    assert main(["slurm", "-o", str(folder / "job.sbatch"), *options]) == 0
    told = slurm.run(["sbatch", "--output=output", "job.sbatch"], folder)
    number = re.search(r"Submitted batch job (\d+)", told.stdout)
    assert number is not None, told.stdout
    return number[1]


def wait_for_log(slurm: Slurm, log: Path, text: str) -> None:
    """Until a role has written it; what the job printed is shown if it does not."""
    try:
        wait_until(in_log(log, text), START, f"{text!r} in {log.name}")
    finally:
        output = log.parents[2] / "output"
        print(output.read_text() if output.exists() else slurm.log_of("slurmctld.log"))


def wait_for_end(slurm: Slurm, number: str) -> dict[str, str]:
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    wait_until(lambda: slurm.job(number)["JobState"] in ended, START, "end of the job")
    return slurm.job(number)


def begins_now(slurm: Slurm, number: str) -> bool:
    """A requeued job would wait for two minutes. Whether it is running; until it has ended, it cannot be told."""
    slurm.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], ROOT)
    return slurm.job(number)["JobState"] == "RUNNING"


def test_eight_tasks_on_four_nodes_train_to_the_bits_of_local_processes(
    slurm: Slurm, data: Path, tmp_path: Path
) -> None:
    script = [str(EXAMPLE / "train.py"), "--mode", "sync", "--epochs", "1", "--data", str(data), "--save"]
    number = submitted(
        slurm, tmp_path, "--server_num", "2", "--worker_num", "6", "--nodes", "4", *script, str(tmp_path / "slurm")
    )
    with forked_fleetrun(
        tmp_path / "local_log", "--server_num", "2", "--worker_num", "6", *script, str(tmp_path / "local")
    ) as job:
        assert job.wait(START) == 0
    assert wait_for_end(slurm, number)["JobState"] == "COMPLETED", (tmp_path / "output").read_text()
    assert not diff(str(tmp_path / "slurm"), str(tmp_path / "local"), None, False)
    folder = tmp_path / "log" / f"slurm-{number}.0"
    assert sorted(path.name for path in folder.glob("*log.*")) == [
        *(f"serverlog.{i}" for i in range(2)), *(f"workerlog.{i}" for i in range(6)),
    ]  # fmt: skip
    assert not (folder / "keys").exists()


def test_a_heterogeneous_job_that_is_asked_to_end_saves_and_goes_on_when_it_is_requeued(
    slurm: Slurm, data: Path, tmp_path: Path
) -> None:
    model = str(tmp_path / "model")
    script = [str(EXAMPLE / "train.py"), "--mode", "sync", "--epochs", "10000", "--data", str(data)]
    number = submitted(
        slurm, tmp_path, "--het", "--server_num", "1", "--worker_num", "2", "--time", "60", "--requeue",
        "--job_name", "two words", "--server_cpus", "1", "--worker_cpus", "2",
        "--save_on_stop", model, "--resume", f"--init_model {model}", *script,
    )  # fmt: skip
    first, again = tmp_path / "log" / f"slurm-{number}.0", tmp_path / "log" / f"slurm-{number}.0-1"
    wait_for_log(slurm, first / "workerlog.0", "watch: loss")
    assert slurm.run(["squeue", "-h", "-o", "%j", "-j", number], tmp_path).stdout.splitlines()[0] == "two words"
    tasks = [process.environ() for process in roles(slurm, number, {"WORKER", "SERVER"})]
    assert len(tasks) == 3
    assert {each["SLURM_CPUS_PER_TASK_HET_GROUP_0"] for each in tasks} == {"1"}
    assert {each["SLURM_CPUS_PER_TASK_HET_GROUP_1"] for each in tasks} == {"2"}
    slurm.run(["scancel", "--signal=USR1", number], tmp_path)  # as Slurm does some seconds before the limit
    wait_for_log(slurm, first / "workerlog.0", f"saved to {model}; ending with status {REQUEUE}")
    wait_until(lambda: slurm.job(number)["Restarts"] == "1", START, "requeued job")
    parts = (number, str(int(number) + 1))
    wait_until(lambda: all(begins_now(slurm, part) for part in parts), START, "begin of the requeued job")
    wait_for_log(slurm, again / "serverlog.0", f"loaded {model}")
    wait_for_log(slurm, again / "workerlog.0", "watch: loss")
    slurm.run(["scancel", number], tmp_path)
    assert wait_for_end(slurm, number)["JobState"] == "CANCELLED"


def test_a_killed_worker_ends_the_job_and_is_named(slurm: Slurm, tmp_path: Path) -> None:
    number = submitted(
        slurm, tmp_path, "--server_num", "1", "--worker_num", "2", TINY, "--steps", "100000", "--pause", "0.1"
    )
    log = tmp_path / "log" / f"slurm-{number}.0" / "workerlog.1"
    wait_for_log(slurm, log, "is training")
    os.kill(_script_of(slurm, number, worker=1), signal.SIGKILL)
    assert wait_for_end(slurm, number)["JobState"] == "FAILED"
    assert lines_naming((tmp_path / "output").read_text(), "[fleetrun]", "worker 1", 128 + signal.SIGKILL)


def test_servers_with_logs_go_on_with_their_rows_when_the_job_is_submitted_again(slurm: Slurm, tmp_path: Path) -> None:
    kept = ("--durability", "log", "--log_store", str(tmp_path / "store"))
    number = submitted(slurm, tmp_path, *kept, TINY, "--steps", "100000", "--pause", "0.05")
    wait_for_log(slurm, tmp_path / "log" / f"slurm-{number}.0" / "workerlog.0", "is training")
    slurm.run(["scancel", number], tmp_path)
    wait_for_end(slurm, number)
    number = submitted(slurm, tmp_path, *kept, TINY, "--steps", "4")
    assert wait_for_end(slurm, number)["JobState"] == "COMPLETED", (tmp_path / "output").read_text()
    log = tmp_path / "log" / f"slurm-{number}.0" / "serverlog.0"
    assert lines_naming(log.read_text(), f"{tmp_path / 'store'}"), log.read_text()


def test_fleetrun_in_every_task_is_refused_and_one_in_a_batch_script_runs(slurm: Slurm, tmp_path: Path) -> None:
    fleetrun = [sys.executable, "-m", "torchfleet.launch", "--worker_num", "2", TINY, "--steps", "4"]
    told = slurm.run(["srun", "--ntasks=3", *fleetrun], tmp_path, timeout=START)
    assert told.returncode == 2
    assert lines_naming(told.stdout, "--cluster slurm", 3)
    assert not (tmp_path / "log").exists()
    (tmp_path / "job.sbatch").write_text(f"#!/bin/bash\n#SBATCH --ntasks=3\n{shlex.join(fleetrun)}\n")
    told = slurm.run(["sbatch", "--wait", "--output=output", "job.sbatch"], tmp_path, timeout=START)
    assert told.returncode == 0, (tmp_path / "output").read_text()
    assert len(list((tmp_path / "log" / "latest").glob("workerlog.*"))) == 2


def test_tasks_are_the_machines_of_a_collective_job(slurm: Slurm, tmp_path: Path) -> None:
    script = str(SCRIPTS / "collective_resume.py")
    here, there = ([script, str(tmp_path / name), str(tmp_path / f"{name}.txt"), "--steps", "4"] for name in "ab")
    with forked_fleetrun(tmp_path / "local_log", "--nproc_per_node", "2", *here) as job:
        assert job.wait(START) == 0
    srun = ["srun", "--ntasks=2", "--nodes=2", *FLEETRUN, "--nproc_per_node", "1"]
    told = slurm.run([*srun, *there], tmp_path, timeout=START)
    assert told.returncode == 0, told.stdout
    assert (tmp_path / "b.txt").read_text() == (tmp_path / "a.txt").read_text()


def test_ranks_that_are_asked_to_end_save_and_end_together(slurm: Slurm, tmp_path: Path) -> None:
    script = [str(SCRIPTS / "asked_ranks.py"), str(tmp_path / "model")]
    srun = ["srun", "--ntasks=2", "--nodes=2", "--job-name=ranks", *FLEETRUN, "--nproc_per_node", "1", *script]
    with slurm.popen(srun, tmp_path) as step:
        wait_until(in_log(tmp_path / "output", "training"), START, "training")
        slurm.run(["scancel", "--signal=USR1", "--name=ranks"], tmp_path)
        assert step.wait(START) == REQUEUE, (tmp_path / "output").read_text()
    assert (tmp_path / "model" / "manifest.json").exists()


def roles(slurm: Slurm, job: str, names: set[str]) -> list[psutil.Process]:
    """The processes of the user's script with one of these roles: the tasks that are their parents have none."""
    found, configuration = [], slurm.environment["SLURM_CONF"]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            told = process.environ()
            is_of_job = job in (told.get("SLURM_JOB_ID"), told.get("SLURM_JOB_ID_HET_GROUP_0"))
            if is_of_job and told.get("SLURM_CONF") == configuration and told.get("FLEET_ROLE") in names:
                found.append(process)
    return found


def _script_of(slurm: Slurm, job: str, worker: int) -> int:
    """The process of a worker's script."""
    for process in roles(slurm, job, {"WORKER"}):
        if process.environ()["FLEET_WORKER_INDEX"] == str(worker):
            return int(process.pid)
    raise AssertionError(f"no worker {worker} of job {job} is running")
