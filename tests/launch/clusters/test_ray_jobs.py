"""Jobs on a real cluster of Ray: two nodes, each a raylet of its own. What kills nodes is in test_ray_losses.py.

One job runs in `make test`; the others are marked `cluster`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.extras import needing
from support.messages import lines_naming
from support.paths import ROOT
from support.ray_nodes import RayNodes, places, ray_nodes
from support.scripts.launching import TINY, fleetrun, run_dir

from torchfleet.base.cgroups import usable_cores
from torchfleet.base.errors import FleetError
from torchfleet.launch import cli
from torchfleet.launch.clusters.on_ray.ray_node import private_folder
from torchfleet.launch.clusters.on_ray.run import run
from torchfleet.launch.roles import free_ports
from torchfleet.ps.checkpoint.comparison import compare

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

FOREVER = "654321"  # steps; also what tells these processes from those of others
SHORT = 240.0  # seconds that a job may take on a busy machine
EXAMPLE = ROOT / "examples" / "ctr_dnn"


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(2) as made:
        yield made


def job(nodes: RayNodes, log_dir: Path, *arguments: str) -> Any:
    return fleetrun(log_dir, "--cluster", f"ray={nodes.address}", *arguments, RAY_TMPDIR=os.environ["RAY_TMPDIR"])


@pytest.mark.cluster
def test_the_ctr_example_unchanged_trains_the_same_bits_as_local_processes(nodes: RayNodes, tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare = [sys.executable, str(EXAMPLE / "prepare.py"), "--rows", "2000", "--parts", "2", "--out", str(data)]
    subprocess.run(prepare, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    counts = ("--server_num", "2", "--worker_num", "2")
    options = ("--mode", "sync", "--epochs", "1", "--batch_size", "360", "--data", str(data), "--save")
    train = str(EXAMPLE / "train.py")
    with fleetrun(tmp_path / "log", *counts, train, *options, str(tmp_path / "local")) as started:
        assert started.wait(SHORT) == 0, started.output
    with job(nodes, tmp_path / "ray_log", *counts, train, *options, str(tmp_path / "ray")) as started:
        assert started.wait(SHORT) == 0, started.output
    assert {place.rpartition(":")[0] for place in places(started.output).values()} == {"127.0.0.2", "127.0.0.3"}
    assert "[worker 0] epoch 1:" in started.output
    assert "listening on 127.0.0." in (run_dir(tmp_path / "ray_log") / "serverlog.1").read_text()
    compared = compare(str(tmp_path / "local"), str(tmp_path / "ray"))
    assert set(compared.tables) == {"embedding", "dense.1"}
    assert compared.is_equal, compared


@pytest.mark.cluster
def test_a_script_that_fails_ends_the_job_with_its_last_lines(nodes: RayNodes, tmp_path: Path) -> None:
    metrics = ("--metrics_port", str(free_ports(1)[0]), "--metrics_host", "0.0.0.0")
    with job(nodes, tmp_path, "--worker_num", "2", *metrics, TINY, "--fail_worker", "1") as started:
        assert started.wait(SHORT) == 1
    (group,) = json.loads((run_dir(tmp_path) / "prometheus_targets.json").read_text())
    hosts = [place.rpartition(":")[0] for place in places(started.output).values()]
    assert [target.rpartition(":")[0] for target in group["targets"]] == hosts
    assert lines_naming(started.output, "worker 1", "status 1")
    assert "RuntimeError: this worker was told to fail" in started.output


@pytest.mark.cluster
def test_ctrl_c_ends_all_processes_on_all_nodes(nodes: RayNodes, tmp_path: Path) -> None:
    with job(nodes, tmp_path, TINY, "--steps", FOREVER, "--pause", "0.1") as started:
        started.wait_for("worker 0 is training", SHORT)
        assert num_scripts() == 2
        started.process.send_signal(signal.SIGINT)
        assert started.wait(SHORT) == 130
    assert num_scripts() == 0


@pytest.mark.cluster
def test_a_job_that_the_nodes_can_never_hold_ends_at_once_and_says_what_is_missing(
    nodes: RayNodes, tmp_path: Path
) -> None:
    with job(nodes, tmp_path, "--worker_num", "2", "--worker_cpus", "5", TINY) as started:
        assert started.wait(SHORT) == 2
    assert lines_naming(started.output, "2 workers", "5 CPU", "8 CPU", "4 CPU")
    assert "waiting for room" not in started.output


def num_scripts() -> int:
    """Processes of tiny.py, wherever they hang in the tree of processes."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum("tiny.py" in line and FOREVER in line for line in lines)


def counted(start: int) -> dict[str, Any]:
    """Called in every process of a job; sent as it is."""
    import torch

    import torchfleet as fleet

    model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4, mode="sum", sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fleet.prepare(model, optimizer, strategy=fleet.DistributedStrategy(a_sync=True))
    for step in range(3):
        model(torch.arange(4).view(1, 4) + start + step).sum().backward()
        optimizer.step()
    return {"worker": fleet.worker_index(), "workers": fleet.worker_num(), "start": start}


@pytest.mark.cluster
def test_a_function_runs_from_a_thread_as_in_a_notebook_and_returns(
    nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchfleet as fleet

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(counted, "__module__", "__main__")  # as a notebook has it: it goes by value
    returned: list[Any] = []

    def call() -> None:
        returned.append(
            fleet.ray.run(counted, 7, server_num=1, worker_num=2, address=nodes.address, log_dir=str(tmp_path / "log"))
        )

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(SHORT)
    assert returned == [{"worker": 0, "workers": 2, "start": 7}]


def status_of(*arguments: str) -> int:
    """What fleetrun returns, in this process. argparse leaves by SystemExit."""
    try:
        return cli.main(arguments)
    except SystemExit as left:
        return int(left.code or 0)


def test_keys_that_a_killed_process_has_left_are_removed_by_the_next() -> None:
    made = "from torchfleet.launch.clusters.on_ray.ray_node import private_folder; print(private_folder())"
    left = Path(subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, check=True).stdout.strip())
    assert left.stat().st_mode & 0o777 == 0o700
    own = private_folder()
    assert not left.exists()
    assert private_folder() != own
    assert own.exists(), "this process lives"
    for folder in own.parent.glob(f"torchfleet-ray-{os.getpid()}-*"):
        folder.rmdir()


class TestWithoutACluster:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--cluster", "dask"), "--cluster expects ray, ray=ADDRESS"),
            (("--cluster", "ray="), "--cluster expects ray, ray=ADDRESS"),
            (("--cluster", "ray", "--servers", "a:1"), "--servers: on Ray the cluster places all processes"),
            (("--cluster", "ray", "--server_num", "auto"), "on Ray, give a number"),
            (("--cluster", "ray", "--worker_num", "0"), "must be at least 1, found 1 and 0"),
            (("--cluster", "ray", "--nproc_per_node", "2", "--worker_num", "2"), "use one kind"),
            (("--cluster", "ray", "--nnodes", "1:2"), "--nnodes and --nproc_per_node must be numbers"),
            (("--cluster", "ray", "--durability", "log"), "--log_store DIR"),
            (("--cluster", "ray", "--replicas", "2"), "give --coordinator etcd://"),
            (("--cluster", "ray", "--worker_cpus", "0"), "--worker_cpus must be a number above 0, found 0"),
            (("--cluster", "ray", "--worker_num", "3:2"), "expected MIN:MAX with 1 <= MIN <= MAX"),
            (("--worker_num", "2:3", "--simulate"), "give one number"),
            (("--placement", "pack"), "add --cluster ray"),
            (("--worker_cpus", "2"), "--worker_cpus: "),
        ],
    )
    def test_a_wrong_option_is_refused_with_status_2(
        self, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
    ) -> None:
        assert status_of(*arguments, "--dry_run", TINY) == 2
        assert message in capsys.readouterr().err

    def test_a_dry_run_shows_actors_and_starts_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = ["--dry_run", "--cluster", "ray", "--server_num", "2", "--worker_cpus", "2", "--worker_memory", "1GB"]
        assert cli.main([*line, TINY]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert [text for text in shown if text.startswith(("server ", "worker "))] == [
            "server 0: python tiny.py   (actor with CPU 1; log: log/latest/serverlog.0)",
            "server 1: python tiny.py   (actor with CPU 1; log: log/latest/serverlog.1)",
            "worker 0: python tiny.py   (actor with CPU 2, memory 1.07374e+09; log: log/latest/workerlog.0)",
        ]

    def test_a_log_and_backups_together_are_taken(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        kept = ["--durability", "log", "--log_store", str(tmp_path / "store")]
        line = ["--dry_run", "--cluster", "ray", "--replicas", "2", "--coordinator", "etcd://etcd:2379/ctr", *kept]
        assert cli.main([*line, TINY]) == 0
        shown = capsys.readouterr().out
        assert [text.partition(":")[0] for text in shown.splitlines() if text.startswith("server 0")] == [
            "server 0",
            "server 0, replica 1",
        ]
        assert f"FLEET_LOG_STORE={tmp_path / 'store'}" in shown

    def test_ray_that_is_not_installed_is_named_with_its_extra(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)  # as Python itself marks what cannot be imported
        assert cli.main(["--cluster", "ray", TINY]) == 2
        assert "pip install 'torchfleet[ray]'" in capsys.readouterr().err

    @pytest.mark.cluster
    @needing("ray")
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"durability": "log"}, "--log_store DIR"),
            ({"log_max_bytes": "many"}, "--log_max_bytes"),
        ],
    )
    def test_options_from_python_are_checked_as_those_of_fleetrun(self, options: dict[str, str], message: str) -> None:
        with pytest.raises(FleetError, match=message):
            run(TINY, address=f"127.0.0.1:{free_ports(1)[0]}", **options)

    @pytest.mark.cluster
    @needing("ray")
    def test_a_ray_of_our_own_has_room_for_more_processes_than_cores(self, tmp_path: Path) -> None:
        num_workers = str(usable_cores() + 1)
        with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # paths of sockets are short
            line = ("--cluster", "ray=local", "--worker_num", num_workers, TINY, "--mode", "async", "--steps", "3")
            with fleetrun(tmp_path, *line, RAY_TMPDIR=folder) as started:
                assert started.wait(SHORT) == 0, started.output
        assert "waiting for room" not in started.output
        assert len(places(started.output)) == usable_cores() + 2

    @pytest.mark.cluster
    @needing("ray")
    def test_a_cluster_that_is_not_there_is_named_at_once(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        place = f"127.0.0.1:{free_ports(1)[0]}"
        assert cli.main(["--log_dir", str(tmp_path / "log"), "--cluster", f"ray={place}", TINY]) == 2
        told = capsys.readouterr().err
        assert lines_naming(told, "--cluster", f"ray={place}")
        assert "ray=local" in told
