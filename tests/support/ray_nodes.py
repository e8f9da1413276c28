"""A real cluster of Ray on this machine: a head without cores, and raylets with addresses of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from support.extras import imported
from support.paths import ROOT

_MEMORY = 80 << 20  # of a node's object store
# Workers of Ray have the lowest priority by default, and 60 s to start: too little on a busy machine of two cores.
_SETTINGS = {"worker_niceness": 0, "worker_register_timeout_seconds": 300, "prestart_worker_first_driver": False}


class RayNodes:
    """`address`: for --cluster ray=...; `hosts`: of the nodes that run something."""

    def __init__(self, cluster: Any) -> None:
        self._cluster, self.address = cluster, cluster.address
        self._nodes: dict[str, Any] = {}

    @property
    def hosts(self) -> list[str]:
        return list(self._nodes)

    @property
    def dashboard(self) -> str:
        """host:port of the head's dashboard, where jobs are submitted."""
        return str(self._cluster.webui_url)

    def add(self, num_cpus: int) -> str:
        """A node more, at 127.0.0.2 and so on. Returns its address."""
        host = f"127.0.0.{len(self._nodes) + 2}"
        self._nodes[host] = self._cluster.add_node(
            num_cpus=num_cpus, object_store_memory=_MEMORY, node_ip_address=host, wait=False
        )
        return host

    def wait(self) -> None:
        self._cluster.wait_for_nodes(timeout=90)

    def kill(self, host: str) -> None:
        """SIGKILL to the raylet of a node and all that it has started, as if the machine were gone."""
        raylet = psutil.Process(self._nodes[host].all_processes["raylet"][0].process.pid)
        for process in [*raylet.children(recursive=True), raylet]:
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)

    def remove(self, host: str) -> None:
        self._cluster.remove_node(self._nodes[host], allow_graceful=False)


def places(output: str) -> dict[str, str]:
    """By the name of a process ("worker 0"): host:port, as fleetrun has printed it when Ray had placed it."""
    line = next(line for line in output.splitlines() if "placed by Ray: " in line)
    return dict(each.split(" on ") for each in line.partition("placed by Ray: ")[2].split(", "))


def _start_head(cluster: Any, arguments: dict[str, Any]) -> None:
    """Ray gives a head 30 s, which may be too little on a busy machine: so it is tried again."""
    for is_last in (False, False, True):
        try:
            cluster.add_node(object_store_memory=_MEMORY, _system_config=_SETTINGS, **arguments)
            return
        except Exception:
            cluster.shutdown()
            if is_last:
                raise


@contextlib.contextmanager
def ray_nodes(num: int, num_cpus: int = 4, **head: Any) -> Iterator[RayNodes]:
    """A head and nodes of `num_cpus` cores each; `head`: more arguments of the head."""
    cluster_utils = imported("ray.cluster_utils")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # paths of sockets are short
        before = {name: os.environ.get(name) for name in ("RAY_TMPDIR", "PYTHONPATH")}
        os.environ |= {"RAY_TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        Path(folder, "ray").mkdir()
        cluster = cluster_utils.Cluster()
        try:
            _start_head(
                cluster,
                {"num_cpus": 0 if num else num_cpus, "include_dashboard": False, "temp_dir": f"{folder}/ray", **head},
            )
            made = RayNodes(cluster)
            for _ in range(num):
                made.add(num_cpus)
            made.wait()
            yield made
        finally:
            cluster.shutdown()
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
