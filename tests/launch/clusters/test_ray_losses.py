"""Jobs on Ray whose nodes are killed under training; large and collective ones. `make test-clusters` runs them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.extras import needing
from support.paths import SCRIPTS
from support.ray_nodes import RayNodes, places, ray_nodes
from support.scripts.launching import TINY, Started, fleetrun, seconds, wait_until

pytestmark = [pytest.mark.cluster, needing("ray"), pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

LONG = 400.0  # seconds that a job may take on a busy machine
DURABLE = str(SCRIPTS / "durable_job.py")


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    """Three: one may be lost. Each has room for two processes."""
    with ray_nodes(3, num_cpus=2) as made:
        yield made


def job(nodes: RayNodes, log_dir: Path, *arguments: str) -> Started:
    return fleetrun(log_dir, "--cluster", f"ray={nodes.address}", *arguments, RAY_TMPDIR=os.environ["RAY_TMPDIR"])


def host_of(started: Started, name: str) -> str:
    return places(started.output)[name].rpartition(":")[0]


def digest(output: str) -> str:
    found = re.search(r"digest: (\w+)", output)
    assert found, output
    return found[1]


def test_a_worker_of_a_killed_node_is_started_on_another_one_and_rejoins(nodes: RayNodes, tmp_path: Path) -> None:
    line = ("--worker_num", "2", "--placement", "spread", "--max_restart", "1", TINY, "--mode", "async")
    enough = tmp_path / "enough"
    with job(nodes, tmp_path, *line, "--steps", "100000", "--pause", "0.05", "--until", str(enough)) as started:
        started.wait_for("worker 0 is training", LONG)
        place, log = host_of(started, "worker 1"), tmp_path / "latest/workerlog.1"
        wait_until(lambda: "worker 1 is training" in log.read_text(), LONG, "first step")
        assert place != host_of(started, "server 0"), "the server must survive"
        with seconds() as passed:
            nodes.kill(place)
            started.wait_for("worker 1 ended with -9; starting it again", LONG)
            noticed = passed()
            wait_until(lambda: log.read_text().count("worker 1 is training") == 2, LONG, "step")
            print(f"worker lost: noticed after {noticed:.1f} s, trains again after {passed():.1f} s")
        enough.touch()
        assert started.wait(LONG) == 0, started.output
    assert (tmp_path / "latest/serverlog.0").read_text().count("worker 1 has joined") == 2


def test_a_server_of_a_killed_node_goes_on_elsewhere_from_its_log_to_the_same_bits(
    nodes: RayNodes, tmp_path: Path
) -> None:
    script = (DURABLE, "--mode", "sync", "--steps", "60", "--pause", "0.05")
    with fleetrun(tmp_path / "local", "--server_num", "2", "--worker_num", "2", *script) as started:
        assert started.wait(LONG) == 0, started.output
    undisturbed = digest(started.output)
    kept = ("--durability", "log", "--log_store", str(tmp_path / "store"), "--max_restart", "2")
    with job(nodes, tmp_path / "ray", "--server_num", "2", "--worker_num", "2", *kept, *script) as started:
        started.wait_for("worker 0 has made step 10", LONG)
        free = {host_of(started, f"server {i}") for i in range(2)} - {host_of(started, "worker 0")}
        lost = next(i for i in range(2) if host_of(started, f"server {i}") in free)
        assert host_of(started, "worker 1") not in free, "both workers must survive: they were packed"
        with seconds() as passed:
            nodes.kill(host_of(started, f"server {lost}"))
            started.wait_for(f"server {lost} is at ", LONG)
            print(f"server lost: has a new address after {passed():.1f} s")
        assert started.wait(LONG) == 0, started.output
    assert digest(started.output) == undisturbed


def test_without_a_log_a_lost_server_ends_the_job_and_it_is_started_again_from_the_last_save(
    nodes: RayNodes, tmp_path: Path
) -> None:
    with job(nodes, tmp_path, "--max_job_restart", "1", TINY, "--steps", "200", "--pause", "0.05") as started:
        started.wait_for("worker 0 is training", LONG)
        nodes.kill(host_of(started, "server 0"))
        started.wait_for("starting the job again (1 of 1)", LONG)
        assert started.wait(LONG) == 0, started.output


def test_ranks_of_a_collective_job_meet_on_ray(nodes: RayNodes, tmp_path: Path) -> None:
    line = ("--nnodes", "2", "--nproc_per_node", "1", str(SCRIPTS / "ranks_play.py"), "sum")
    with job(nodes, tmp_path, *line) as started:
        assert started.wait(LONG) == 0, started.output
    assert host_of(started, "rank 0") != host_of(started, "rank 1")
    assert "[rank 0] sum [1, 2]" in started.output


def test_a_killed_driver_leaves_no_process_behind(nodes: RayNodes, tmp_path: Path) -> None:
    with job(nodes, tmp_path, TINY, "--steps", "765432", "--pause", "0.1") as started:
        started.wait_for("worker 0 is training", LONG)
        started.process.send_signal(signal.SIGKILL)
        started.wait(LONG)
        wait_until(lambda: num_with("765432") == 0, 120.0, "end of all processes")


def num_with(argument: str) -> int:
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum("tiny.py" in line and argument in line for line in lines)


def test_sixteen_workers_train_on_four_nodes(tmp_path: Path) -> None:
    with ray_nodes(4, num_cpus=5) as nodes:
        line = ("--server_num", "4", "--worker_num", "16", "--placement", "spread", TINY, "--steps", "5")
        with job(nodes, tmp_path, *line) as started:
            assert started.wait(LONG) == 0, started.output
        found = places(started.output)
        hosts = [place.rpartition(":")[0] for name, place in found.items() if name.startswith("worker")]
        assert {host: hosts.count(host) for host in hosts} == dict.fromkeys(nodes.hosts, 4)


def test_workers_come_and_go_with_nodes(tmp_path: Path) -> None:
    enough, log = tmp_path / "enough", tmp_path / "log"
    script = (TINY, "--mode", "async", "--steps", "100000", "--pause", "0.05", "--until", str(enough))
    with ray_nodes(1, num_cpus=3) as nodes, job(nodes, log, "--worker_num", "2:3", *script) as started:
        started.wait_for("worker 0 is training", LONG)
        assert "worker 2" not in places(started.output)
        host = nodes.add(1)
        started.wait_for(f"worker 2 joins on {host}:", LONG)
        third = log / "latest/workerlog.2"
        wait_until(lambda: "worker 2 is training" in third.read_text(), LONG, "step of worker 2")
        nodes.kill(host)
        started.wait_for("worker 2 is gone with its node; the others go on", LONG)
        enough.touch()
        assert started.wait(LONG) == 0, started.output


def test_ray_job_submit_runs_fleetrun_on_the_cluster(tmp_path: Path) -> None:
    from ray.job_submission import JobSubmissionClient

    (tmp_path / "work").mkdir()
    for name in ("tiny.py", "without_compiler.py"):
        shutil.copy(Path(TINY).with_name(name), tmp_path / "work")
    # One node: several on one machine share the folder that Ray unpacks into, and one removes what another uses.
    with ray_nodes(0, num_cpus=4, include_dashboard=True, dashboard_port=0) as nodes:
        client: Any = JobSubmissionClient(f"http://{nodes.dashboard}")
        entry = f"{sys.executable} -m torchfleet.launch --cluster ray --worker_num 2 tiny.py --steps 5"
        number = submitted(client, entry, {"working_dir": str(tmp_path / "work")})
        wait_until(lambda: client.get_job_status(number).is_terminal(), LONG, "end of the job")
        assert client.get_job_status(number) == "SUCCEEDED", client.get_job_logs(number)
        assert "[worker 0] worker 0 of 2 ends with loss" in client.get_job_logs(number)


def submitted(client: Any, entry: str, environment: dict[str, str]) -> str:
    """The number of the job. A head that has just started says that it has no agent yet."""
    deadline = time.monotonic() + LONG
    while True:
        try:
            return str(client.submit_job(entrypoint=entry, runtime_env=environment))
        except RuntimeError as error:
            if "try again later" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
