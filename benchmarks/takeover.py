"""How long a shard is silent when its primary is killed under load, and what a backup costs: `--json` for one line.

Two replicas and a client that pushes without a pause, as processes of this machine. A killed replica is started again
and filled; then the other one is killed. Every push adds a known number to known rows: what is lost or doubled shows.
`--load N --seconds S` runs N busy processes beside them, and first counts the changes of view in S seconds without a
fault: each of them is false.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil

from torchfleet.base.errors import FleetError
from torchfleet.launch.endurance.loss import tell_of_loss
from torchfleet.launch.roles import free_ports
from torchfleet.ps.coordination.coordinators import make_coordinator
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.server.replicas.between import replica_of
from torchfleet.ps.tables.settings.spec import Rule, TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

NUM_KEYS = 1000
START = 120.0


class Replicas:
    """The two processes, under a launcher that is this benchmark."""

    def __init__(self, folder: Path, url: str | None, is_told: bool) -> None:
        """`is_told`: a replica is told at once that the other one's process has ended, as fleetrun does."""
        self.places = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
        self._url, self._is_told, self._log = url or f"file://{folder}", is_told, (folder / "log").open("ab")
        self._coordinator = make_coordinator(self._url)
        self._restarts = [0, 0]
        self._processes = [self._start(0), self._start(1)]

    def _start(self, replica: int) -> subprocess.Popen[bytes]:
        options = ["--places", "|".join(self.places), "--replica", str(replica), "--coordinator", self._url]
        command = [sys.executable, "-m", "benchmarks.takeover_server", *options, "--restart"]
        return subprocess.Popen([*command, str(self._restarts[replica])], stdout=self._log, stderr=self._log)

    def primary(self) -> int:
        """Which one is primary, once it has a backup."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            view = self._coordinator.read(0)
            if view is not None and view.backup:
                return replica_of(view.primary)
            self._start_again()
            time.sleep(0.02)
        raise FleetError(f"no backup is in step after {START:g} s")

    def false_changes(self, seconds: float) -> dict[str, int]:
        """How often a backup took over, and how often a backup was given up, in `seconds` without a fault."""
        found = {"false_takeovers": 0, "false_drops": 0}
        before, deadline = self._coordinator.read(0), time.monotonic() + seconds
        while time.monotonic() < deadline:
            view = self._coordinator.read(0)
            if view is not None and before is not None and view.term > before.term:
                found["false_takeovers"] += view.primary != before.primary
                found["false_drops"] += view.primary == before.primary and bool(before.backup)
                before = view
            self._start_again()
            time.sleep(0.02)
        return found

    def _start_again(self) -> None:
        """As fleetrun does with one that was deposed."""
        for replica, process in enumerate(self._processes):
            if process.poll() is not None:
                self._restarts[replica] += 1
                self._processes[replica] = self._start(replica)

    def kill(self, replica: int) -> float:
        """Kill it, and let it begin anew; returns when it was dead."""
        self._processes[replica].kill()
        self._processes[replica].wait()
        dead = time.monotonic()
        if self._is_told:
            tell_of_loss(self.places[1 - replica], None, 0, replica, self._restarts[replica])
        self._restarts[replica] += 1
        self._processes[replica] = self._start(replica)
        return dead

    def seconds(self) -> list[float]:
        """Processor time of both."""
        return [sum(psutil.Process(process.pid).cpu_times()[:2]) for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.close()


class Load:
    """Pushes from a thread, one after the other, and when each was answered."""

    def __init__(self, client: Client, dim: int, num_keys: int = NUM_KEYS) -> None:
        self._client, self._grads = client, np.full((num_keys, dim), -1.0, np.float32)
        self.answered = [time.monotonic()]
        self.error: FleetError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        keys = np.arange(len(self._grads), dtype=np.uint64)
        try:
            while not self._over.is_set():
                self._client.push("rows", keys, self._grads).result()
                self.answered.append(time.monotonic())
        except FleetError as error:
            self.error = error

    def end(self) -> int:
        """How many pushes were acknowledged. Raises what ended them."""
        self._over.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        return len(self.answered) - 1

    def silence(self, since: float) -> float:
        """Seconds without an answer after a moment; the first one may have been on its way."""
        while self.error is None:
            later = [moment for moment in self.answered[-4096:] if moment > since]
            if len(later) > 2:
                return float(np.diff([since, *later[:3]]).max())
            time.sleep(0.01)
        raise self.error


@contextmanager
def busy(num: int) -> Iterator[None]:
    """`num` processes that compute without a pause."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def replicas(url: str | None, is_told: bool) -> Iterator[Replicas]:
    with tempfile.TemporaryDirectory() as name:
        made = Replicas(Path(name), url, is_told)
        try:
            yield made
        finally:
            made.close()


def connect(endpoint: str, dim: int) -> Client:
    client = Client.connect([endpoint], patience=Patience(60.0, 5))
    deadline = time.monotonic() + START
    while client.unready(1.0) and time.monotonic() < deadline:
        time.sleep(0.05)
    client.create_table(TableSpec("rows", dim=dim, rule=Rule("sgd", lr=1.0)))
    return client


def fill(client: Client, num_rows: int, dim: int) -> None:
    """Rows that stay as they are, beside those that are pushed to."""
    for start in range(NUM_KEYS, NUM_KEYS + num_rows, 1 << 16):
        keys = np.arange(start, min(start + (1 << 16), NUM_KEYS + num_rows), dtype=np.uint64)
        client.assign("rows", keys, np.full((len(keys), dim), 0.5, np.float32))


def measure_kills(options: argparse.Namespace) -> dict[str, object]:
    silences, filled = [], []
    with (
        replicas(options.coordinator, not options.untold) as pair,
        connect("|".join(pair.places), options.dim) as client,
        ExitStack() as stack,
    ):
        fill(client, options.rows, options.dim)
        load = Load(client, options.dim, options.batch)
        pair.primary()
        stack.enter_context(busy(options.load))
        changes = pair.false_changes(options.seconds)
        for number in range(options.kills):
            primary = pair.primary()
            load.silence(time.monotonic())  # pushes flow
            dead = pair.kill(primary)
            silences.append(load.silence(dead))
            pair.primary()
            filled.append(time.monotonic() - dead)
            print(
                f"kill {number + 1}: silent for {silences[-1]:.3f} s, a backup after {filled[-1]:.1f} s",
                file=sys.stderr,
            )
        num_pushes = load.end()
        rows = client.pull("rows", np.arange(NUM_KEYS, dtype=np.uint64)).result()
    off = rows - num_pushes
    return {
        **changes,
        "kills": options.kills,
        "takeover_p50_s": round(statistics.median(silences), 3),
        "takeover_p99_s": round(float(np.quantile(silences, 0.99)), 3),
        "takeover_max_s": round(max(silences), 3),
        "backup_after_s": round(statistics.median(filled), 1),
        "pushes": num_pushes,
        "lost": int(np.count_nonzero(off < 0)),
        "doubled": int(np.count_nonzero(off > 0)),
        "rows": options.rows,
    }


def measure_cost(options: argparse.Namespace) -> dict[str, object]:
    """Processor time of a server for a push, with and without a backup, in turns."""
    plain: list[float] = []
    primary: list[float] = []
    backup: list[float] = []
    with (
        ServerProcess() as server,
        connect(server.endpoint, options.dim) as alone,
        replicas(None, True) as pair,
        connect("|".join(pair.places), options.dim) as client,
    ):
        first = pair.primary()
        for _ in range(options.rounds):
            before = sum(psutil.Process(server.pid).cpu_times()[:2])
            _pushes(alone, options)
            plain.append(sum(psutil.Process(server.pid).cpu_times()[:2]) - before)
            befores = pair.seconds()
            _pushes(client, options)
            spent = [after - before for after, before in zip(pair.seconds(), befores, strict=True)]
            primary.append(spent[first])
            backup.append(spent[1 - first])
    scale = 1e6 / options.pushes_per_round
    return {
        "plain_push_us": round(scale * statistics.median(plain)),
        "primary_push_us": round(scale * statistics.median(primary)),
        "backup_push_us": round(scale * statistics.median(backup)),
        "primary_cpu_ratio": round(statistics.median(primary) / statistics.median(plain), 2),
    }


def _pushes(client: Client, options: argparse.Namespace) -> None:
    """Push `pushes_per_round` times, with eight under way."""
    keys, grads = np.arange(options.keys, dtype=np.uint64), np.full((options.keys, options.dim), -1.0, np.float32)
    for future in [client.push("rows", keys, grads) for _ in range(options.pushes_per_round)]:
        future.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=0, help="beside those that are pushed to")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--untold", action="store_true", help="no launcher tells of a loss: silence does")
    parser.add_argument("--batch", type=int, default=NUM_KEYS, help="keys of a push under which replicas are killed")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the replicas")
    parser.add_argument("--seconds", type=float, default=0.0, help="without a fault, before the first kill")
    parser.add_argument("--coordinator", help="etcd://host:port/NAME (default: files)")
    parser.add_argument("--cost", action="store_true", help="measure what a backup costs, without kills")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pushes_per_round", type=int, default=500, help="in a round of --cost")
    parser.add_argument("--keys", type=int, default=10_000, help="of a push of --cost")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure_cost(options) if options.cost else measure_kills(options)
    print(json.dumps({**found, **vars(options)}) if options.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
