"""One role in the foreground: its environment, its signals and status, its health port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.messages import naming
from support.paths import ROOT
from support.scripts.launching import SOON, clean_environment, wait_until

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.stop_request import REQUEUE
from torchfleet.launch.clusters.foreground import asks_blocked
from torchfleet.launch.clusters.health import STUCK, HealthPort
from torchfleet.launch.clusters.member import Child, member_environment, read_role, wait_for_own_name
from torchfleet.launch.roles import free_ports

WORKER = {"FLEET_GROUP": "worker", "FLEET_INDEX": "1", "FLEET_SERVER_ENDPOINTS": "a:1,b:1", "FLEET_NUM_WORKERS": "3"}
# Looks for the signal as stop_if_asked does, and starts a program that knows nothing of it.
LOOKS = """
import subprocess, sys, time
from torchfleet.base.monitor.stop_request import REQUEUE, stop_request
other = subprocess.Popen(["sleep", "60"])
print("ready", flush=True)
while not stop_request.has_come():
    time.sleep(0.05)
sys.exit(REQUEUE if other.poll() is None else 3)
"""
WAITS = "import time; print('ready', flush=True); time.sleep(60)"


def started(tmp_path: Path, script: str, variables: Mapping[str, str] = WORKER, **more: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    return subprocess.Popen(
        [sys.executable, "-m", "torchfleet.launch.clusters.member", str(path)],
        env=clean_environment(**variables, **more, PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ready(member: subprocess.Popen[str]) -> None:
    assert member.stdout is not None
    assert member.stdout.readline() == "ready\n"


def test_the_scheduler_s_variables_become_a_role() -> None:
    info = read_role(member_environment(WORKER))
    assert (info.role, info.worker_index, info.num_workers, info.num_servers) == ("worker", 1, 3, 2)
    assert info.asks_restart
    indexed = {name: value for name, value in WORKER.items() if name != "FLEET_INDEX"}
    info = read_role(member_environment({**indexed, "FLEET_GROUP": "server", "JOB_COMPLETION_INDEX": "1"}))
    assert (info.role, info.server_index) == ("server", 1)
    assert read_role(member_environment({**WORKER, "FLEET_RESTART": "2"})).restart == 2
    assert read_role(member_environment({**WORKER, "FLEET_MAX_RESTART": "3"})).max_restart == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"FLEET_GROUP": "master"}, "FLEET_GROUP server worker"),
        ({"FLEET_INDEX": ""}, "number"),
        ({"FLEET_INDEX": "7"}, "3"),
    ],
)
def test_mistakes_of_the_environment_are_named(change: dict[str, str], told: str) -> None:
    with pytest.raises(RoleError, match=naming(*told.split())):
        read_role(member_environment({**WORKER, **change}))


def test_a_mistake_ends_it_with_status_2_and_a_script_with_its_own(tmp_path: Path) -> None:
    with started(tmp_path, "raise SystemExit(5)") as member:
        assert member.wait(SOON) == 5
    with started(tmp_path, "pass", {**WORKER, "FLEET_GRACE": "soon"}) as member:
        assert "FLEET_GRACE" in member.communicate(timeout=200)[0]
        assert member.returncode == 2


def test_with_a_grace_sigterm_asks_the_script_to_save_and_programs_of_it_live(tmp_path: Path) -> None:
    with started(tmp_path, LOOKS, FLEET_GRACE="60") as member:
        ready(member)
        member.send_signal(signal.SIGTERM)
        assert member.wait(SOON) == REQUEUE


def test_sigusr1_reaches_a_script_that_looks_for_it_later(tmp_path: Path) -> None:
    with started(tmp_path, f"import time\nprint('ready', flush=True)\ntime.sleep(1)\n{LOOKS}") as member:
        ready(member)
        member.send_signal(signal.SIGUSR1)
        assert member.wait(SOON) == REQUEUE


def test_a_script_that_does_not_save_is_ended_after_the_grace_with_its_group(tmp_path: Path) -> None:
    with started(tmp_path, WAITS, FLEET_GRACE="0.5") as member:
        ready(member)
        member.send_signal(signal.SIGTERM)
        assert member.wait(SOON) == 128 + signal.SIGTERM


def test_the_health_port_answers_while_the_script_runs(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with started(tmp_path, WAITS, FLEET_HEALTH_PORT=str(port)) as member:
        ready(member)
        assert (answer(port, "/healthz"), answer(port, "/readyz"), answer(port, "/")) == (200, 503, 404)
        member.send_signal(signal.SIGTERM)
        member.wait(SOON)


def test_a_server_whose_loop_does_not_turn_is_not_healthy(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    status = tmp_path / "status"
    child = Child(["/bin/sleep", "60"], os.environ)
    with HealthPort(port, status, is_server=True) as server:
        server.watch(child)
        assert (answer(port, "/healthz"), answer(port, "/readyz")) == (200, 503)
        status.touch()
        assert (answer(port, "/healthz"), answer(port, "/readyz")) == (200, 200)
        status.write_text('{"backup": true, "in_step": false}')
        assert (answer(port, "/healthz"), answer(port, "/readyz")) == (200, 503)
        status.write_text('{"backup": true, "in_step": true}')
        assert answer(port, "/readyz") == 200
        long_ago = time.time() - STUCK - 1
        os.utime(status, (long_ago, long_ago))
        assert answer(port, "/healthz") == 503
        status.touch()
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: answer(port, "/healthz") == 503, SOON, "bad health of a script that ended")


def test_a_server_waits_for_its_own_name() -> None:
    wait_for_own_name("localhost", 1.0)
    with pytest.raises(RoleError, match=naming("no-such-host.invalid", "0.3")):
        wait_for_own_name("no-such-host.invalid", 0.3)


def answer(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_signal_that_another_thread_gets_waits_for_this_one() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait, daemon=True)
    other.start()
    with asks_blocked():
        assert other.ident is not None
        signal.pthread_kill(other.ident, signal.SIGUSR1)
        wait_until(lambda: signal.SIGUSR1 in signal.sigpending(), SOON, "signal in this thread")
    over.set()
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_all_output_of_a_member_is_json_if_it_is_asked_for(tmp_path: Path) -> None:
    script = "import os, sys; print('hé', os.environ.get('FLEET_LOG_FORMAT')); sys.stderr.write('no end'); sys.exit(3)"
    with started(tmp_path, script, FLEET_LOG_FORMAT="json") as member:
        output, _ = member.communicate(timeout=200)
    found = [json.loads(line) for line in output.splitlines()]
    assert [(line["role"], line["index"], line["text"]) for line in found] == [
        ("worker", 1, "hé None"),
        ("worker", 1, "no end"),
    ]
    assert member.returncode == 3
