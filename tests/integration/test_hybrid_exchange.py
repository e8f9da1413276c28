"""The network of hybrid mode through the servers, in real processes: killed workers and servers, keys, a wire that is
listened to. A parameter with a constant gradient counts the rounds: one that is lost or doubled shows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.messages import lines_naming
from support.paths import SCRIPTS
from support.scripts.gates import close_gates, open_gate
from support.scripts.launching import SOON, START, Started, clean_environment, forked_fleetrun, wait_until

from benchmarks.links import Link, LinkError, link
from torchfleet.ps.net.keys import keygen

SCRIPT = str(SCRIPTS / "exchange_job.py")
LEASE = 3.0  # of workers that are lost, in seconds
SERVERS = {"exchange": "servers"}
PATTERN = 1234.5678

pytestmark = pytest.mark.slow


def started(
    folder: Path,
    *launch: str,
    options: tuple[str, ...] = (),
    configs: dict[str, Any] | None = None,
    lease: float = 30.0,
) -> Started:
    """`lease`: seconds after which a silent worker is lost. On busy cores one may not run for a while."""
    arguments = ("--configs", json.dumps(SERVERS if configs is None else configs), *options)
    environment = {"FLEET_WORKER_TIMEOUT": str(lease)}
    return forked_fleetrun(folder / "log", *launch, SCRIPT, *arguments, **environment)


def log(folder: Path, worker: int) -> str:
    path = folder / "log" / "latest" / f"workerlog.{worker}"
    return path.read_text() if path.exists() else ""


def steps(folder: Path, worker: int) -> list[tuple[int, list[float], float]]:
    """(round, values, seconds) of all steps of a worker and its successors."""
    found = re.findall(r"^round (\d+) values (.*) seconds ([0-9.]+)$", log(folder, worker), re.MULTILINE)
    return [(int(number), json.loads(values), float(seconds)) for number, values, seconds in found]


def parts_of(folder: Path, worker: int) -> list[tuple[int, list[list[int]]]]:
    """(round, worker and round of each gradient in it), with a quorum."""
    found = re.findall(r"^parts of (\d+): (.*)$", log(folder, worker), re.MULTILINE)
    return [(int(number), json.loads(parts)) for number, parts in found]


def assert_every_round_counts_once(folder: Path, num_workers: int) -> int:
    """All numbers of a step are the same, all workers agree, and every round moves them by one. Returns the last."""
    by_round: dict[int, float] = {}
    for worker in range(num_workers):
        for number, values, _ in steps(folder, worker):
            (value,) = values
            assert by_round.setdefault(number, value) == value, f"worker {worker} in round {number}"
    values = [by_round[number] for number in sorted(by_round)]
    assert values == [-float(i + 1) for i in range(len(values))]
    return len(values)


@pytest.mark.parametrize("kept", ["log", "replicas"])
def test_servers_that_are_killed_make_every_round_once(kept: str, tmp_path: Path) -> None:
    """A server that keeps a log is started again from it; with replicas the backup goes on. The workers wait for
    each kill."""
    num_servers = 2 if kept == "log" else 1
    gates = [5 * (server + 1) + 3 for server in range(num_servers)]
    close_gates(tmp_path / "gates", *gates)
    launch = ("--server_num", str(num_servers), "--worker_num", "2", "--max_restart", "3")
    store = ("--durability", "log", "--log_store", str(tmp_path / "store")) if kept == "log" else ("--replicas", "2")
    options = ("--steps", "25", "--pause", "0.02", "--gates", str(tmp_path / "gates"))
    with started(tmp_path, *launch, *store, options=options) as job:
        for server in range(num_servers):
            wait_until(lambda: len(steps(tmp_path, 0)) > 5 * (server + 1), START, "steps")  # noqa: B023
            os.kill(job.pid("SERVER", server), signal.SIGKILL)
            wait_until(lambda: len(lines_naming(job.output, "SIGKILL")) > server, SOON, "notice")  # noqa: B023
            open_gate(tmp_path / "gates", gates[server])
        assert job.wait() == 0, job.output
    assert assert_every_round_counts_once(tmp_path, 2) == 25


def test_with_a_quorum_every_round_has_the_gradients_that_it_names_with_a_slow_and_a_killed_worker(
    tmp_path: Path,
) -> None:
    """The last of three workers is slow, and enters again for every step. Worker 1 is killed and started again. Each
    worker's gradient is another one, so that a value says whose gradients were in it."""
    launch = ("--server_num", "2", "--worker_num", "3", "--on_worker_loss", "go_on", "--max_restart", "3")
    configs = {**SERVERS, "quorum": 2, "quorum_max_age": 1}
    options = ("--steps", "30", "--pause", "0.03", "--slow", "0.3", "--by_worker")
    with started(tmp_path, *launch, options=options, configs=configs, lease=LEASE) as job:
        wait_until(lambda: len(steps(tmp_path, 1)) > 5 and "missed" in log(tmp_path, 2), START, "steps")
        os.kill(job.pid("WORKER", 1), signal.SIGKILL)
        assert job.wait() == 0, job.output
    values = {number: found[0] for worker in range(3) for number, found, _ in steps(tmp_path, worker)}
    parts = {number: found for worker in range(3) for number, found in parts_of(tmp_path, worker)}
    for worker in range(3):
        assert all(found == [values[number]] for number, found, _ in steps(tmp_path, worker)), "networks are alike"
        assert all(found == parts[number] for number, found in parts_of(tmp_path, worker))
    expected = 0.0
    for number in sorted(parts):
        expected -= sum(worker + 1 for worker, _ in parts[number]) / len(parts[number])
        assert values[number] == pytest.approx(expected, abs=1e-3)
    given = [tuple(part) for found in parts.values() for part in found]
    assert len(given) == len(set(given)), "no gradient is in two rounds"
    ended = lines_naming(log(tmp_path, 0), "quorum 2", "samples", "late", "dropped")
    assert len(ended) == 1


def test_with_keys_the_network_goes_through_the_servers_by_itself(tmp_path: Path) -> None:
    keygen(str(tmp_path / "keys"))
    launch = ("--server_num", "2", "--worker_num", "2", "--key_dir", str(tmp_path / "keys"))
    with started(tmp_path, *launch, configs={}) as job:
        assert job.wait() == 0, job.output
    assert "2 workers, through the servers (cpu)" in log(tmp_path, 0)
    assert assert_every_round_counts_once(tmp_path, 2) == 10


@pytest.mark.long
def test_twenty_killed_workers_cost_the_others_no_more_than_the_lease(tmp_path: Path) -> None:
    """Each is started again and joins: twenty joins. Worker 0 goes on all the time."""
    num_kills, launch = (
        20,
        ("--server_num", "2", "--worker_num", "3", "--on_worker_loss", "go_on", "--max_restart", "20"),
    )
    with started(tmp_path, *launch, options=("--steps", "4000", "--pause", "0.05"), lease=LEASE) as job:
        wait_until(lambda: steps(tmp_path, 0) and steps(tmp_path, 1) and steps(tmp_path, 2), START, "steps")
        for kill in range(num_kills):
            worker = 1 + kill % 2
            before = len(steps(tmp_path, worker))
            os.kill(job.pid("WORKER", worker), signal.SIGKILL)
            wait_until(lambda: len(steps(tmp_path, worker)) > before + 3, START, "the worker back")  # noqa: B023
        longest = max(seconds for _, _, seconds in steps(tmp_path, 0)[5:])
        num_made = len(steps(tmp_path, 0))
        job.process.send_signal(signal.SIGTERM)
        job.wait()
    print(f"longest pause {longest:.2f} s in {num_made} rounds with {num_kills} kills")
    assert "starting all workers again" not in job.output
    assert assert_every_round_counts_once(tmp_path, 3) >= num_made
    assert longest < LEASE + 2.0


@contextlib.contextmanager
def listening(joined: Link, path: Path) -> Iterator[None]:
    """Writes all that passes the link to a file."""
    code = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)); s.bind((sys.argv[1], 0))\n"
        "s.setsockopt(socket.SOL_SOCKET, 33, 1 << 28)\n"  # SO_RCVBUFFORCE
        "with open(sys.argv[2], 'wb') as f:\n"
        "    print('ready', flush=True)\n"
        "    while True: f.write(s.recv(1 << 17)); f.flush()\n"
    )
    command = joined.inside(1, sys.executable, "-c", code, joined.devices[1], str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            time.sleep(0.5)
            listener.kill()


@pytest.mark.long
@pytest.mark.xdist_group("slow_links")
@pytest.mark.parametrize("way", ["servers", "ranks"])
def test_on_two_machines_with_keys_no_gradient_passes_in_plain(tmp_path: Path, way: str) -> None:
    """The server and worker 0 are on one machine, worker 1 on another. Among ranks, which must say --insecure, the
    pattern is there: the listener would have seen it."""
    keygen(str(tmp_path / "keys"))
    try:
        with link() as joined:
            run_on_both(joined, tmp_path, way)
    except LinkError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    heard = (tmp_path / "heard").read_bytes()
    assert len(heard) > 100_000
    patterns = [struct.pack("<f", value) * 4 for value in (PATTERN, PATTERN / 2)]  # torch divides before it adds
    assert any(pattern in heard for pattern in patterns) == (way == "ranks")


def run_on_both(joined: Link, folder: Path, way: str) -> None:
    places = ["--servers", f"{joined.addresses[0]}:29555", "--workers", ",".join(f"{a}:0" for a in joined.addresses)]
    places += ["--key_dir", str(folder / "keys"), *(["--insecure"] if way == "ranks" else [])]
    configs = {"exchange": "ranks"} if way == "ranks" else {}
    script = [SCRIPT, "--configs", json.dumps(configs), "--gradient", str(PATTERN), "--steps", "5"]
    with listening(joined, folder / "heard"), contextlib.ExitStack() as ends:
        both = []
        for end in range(2):
            launch = [sys.executable, "-m", "torchfleet.launch", "--log_dir", str(folder / f"log{end}"), *places]
            both.append(
                ends.enter_context(
                    subprocess.Popen(
                        joined.inside(end, *launch, *script),
                        env=clean_environment(POD_IP=joined.addresses[end]),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
            )
        outputs = [process.communicate(timeout=START)[0] for process in both]
        assert [process.returncode for process in both] == [0, 0], outputs
