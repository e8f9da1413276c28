"""The ports of a collective job on one machine, under a client that has no part in it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from pathlib import Path

import psutil
import pytest
from support.scripts.launching import fleetrun

SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1000)
for step in range(300):
    dist.all_reduce(value)
    value /= dist.get_world_size()
    if step % 100 == 50:
        dist.all_reduce(value, group=dist.new_group(backend="gloo"))  # new connections
        value /= dist.get_world_size()
    time.sleep(0.005)
assert value.eq(1).all()
dist.destroy_process_group()
"""


class Stranger(threading.Thread):
    """Connects to every port of the job's processes: some connections say nothing and stay, others bring garbage."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._is_over, self._dice = pid, threading.Event(), random.Random(0)
        self.addresses: set[str] = set()
        self.num_sent = 0

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            while not self._is_over.wait(0.02):
                for host, port in _listening(self._pid):
                    self.addresses.add(host)
                    with contextlib.suppress(OSError):
                        client = socket.create_connection((host, port), timeout=1)
                        if self.num_sent < 200:
                            stack.enter_context(client)
                        client.sendall(self._dice.randbytes(self._dice.choice([0, 1, 8, 64, 4096])))
                        self.num_sent += 1

    def stop(self) -> None:
        self._is_over.set()
        self.join(60)


def _listening(pid: int) -> set[tuple[str, int]]:
    found = set()
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                bound = process.net_connections("tcp")
                found |= {(each.laddr.ip, each.laddr.port) for each in bound if each.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.slow
@pytest.mark.long
def test_garbage_and_silence_at_the_ports_of_ranks_do_no_harm(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with fleetrun(tmp_path / "log", "--nproc_per_node", "2", str(script)) as started:
        stranger = Stranger(started.process.pid)
        stranger.start()
        try:
            assert started.wait(180) == 0, started.output
        finally:
            stranger.stop()
    assert stranger.num_sent > 0
    assert stranger.addresses <= {"127.0.0.1", "::1"}
