"""What one client can do to the others: each attack on a server beside a client that only wants its rows.

python -m benchmarks.abuse --json            all attacks, about three minutes
python -m benchmarks.abuse --quick --json    shorter, to see that it works
python -m benchmarks.abuse --only frames,unread
python -m benchmarks.abuse --training 2      two workers train on the server all the time, each on a core of its own

`p99_ratio`: the slowest hundredth of the honest client's requests during an attack, to those before it (at least
`--floor_ms`, below which a wait is no harm). `held_bytes`: what the server's memory grew by, at most, in that time.
With `--training` workers train on the server before, during and after the attack, so that both figures of the ratio are
those of busy cores; `steps_ratio`: their steps per second during the attack, to those at rest. Linux only: the memory
comes from /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.abuse_attacks import ATTACKS, BIG, SPEC, TRAINED
from benchmarks.timing import log, report
from torchfleet.ps.net.keys import KeyFolder, keygen
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

_NUM_WORKERS = 8
_BODY = {"host": "here", "pid": 1, "num_workers": _NUM_WORKERS, "timeout": 60.0, "sync_timeout": 600.0}
_ROWS_OF_BIG = 1_000_000


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.abuse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(ATTACKS), help="names of attacks, separated by commas")
    parser.add_argument("--seconds", type=float, default=6.0, help="of every attack, and of the rest around it")
    parser.add_argument("--keys_per_pull", type=int, default=26_000)
    parser.add_argument("--floor_ms", type=float, default=10.0, help="a p99 at rest counts as at least this")
    parser.add_argument("--training", type=int, default=0, help="workers that train meanwhile, a busy core each")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if unknown := set(chosen.only.split(",")) - set(ATTACKS):
        parser.error(f"--only: expected names among {', '.join(ATTACKS)}; found {', '.join(sorted(unknown))}")
    if chosen.quick:
        chosen.seconds = 2.0
    return chosen


class Memory:
    """The largest resident size of a process that was seen."""

    def __init__(self, pid: int) -> None:
        self._path, self._over = Path(f"/proc/{pid}/statm"), threading.Event()
        self.first = self.most = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """How many bytes it grew by."""
        self._over.set()
        self._thread.join()
        return self.most - self.first

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, self._now())

    def _now(self) -> int:
        with contextlib.suppress(OSError, IndexError):  # the server may have ended
            return int(self._path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0


def waits(client: Client, seconds: float, num_keys: int) -> list[float]:
    """Milliseconds of every pull, one every ten milliseconds."""
    rng, found, end = np.random.default_rng(2), [], time.monotonic() + seconds
    while time.monotonic() < end:
        keys = rng.integers(0, 200_000, num_keys).astype(np.uint64)
        started = time.perf_counter()
        client.pull(SPEC.name, keys).result()
        found.append(1000 * (time.perf_counter() - started))
        time.sleep(max(0.0, 0.01 - found[-1] / 1000))
    return found


class Training:
    """Workers that train on a server; how many steps they make."""

    def __init__(self, chosen: argparse.Namespace, server: ServerProcess, key_dir: str | None, client: Client) -> None:
        self._client = client
        self._workers: list[subprocess.Popen[str]] = []
        own = [server.endpoint, *([key_dir] if key_dir else [])]
        for worker in range(1, chosen.training + 1):
            command = [sys.executable, "-m", "benchmarks.abuse_training", str(worker), *own]
            self._workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for started in self._workers:
            assert started.stdout is not None
            if not started.stdout.readline():
                raise SystemExit(f"a worker of --training ended with status {started.wait()}")

    def num_steps(self) -> int:
        return int(self._client.stats()[0]["tables"][TRAINED.name]["step"]) if self._workers else 0

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


@contextlib.contextmanager
def served(key_dir: str | None) -> Iterator[tuple[ServerProcess, Client]]:
    """A server with a small table and a large one, and an honest client that has joined."""
    own = ["--key_dir", key_dir] if key_dir else []
    keys = KeyFolder(key_dir) if key_dir else None
    with (
        ServerProcess("tcp://127.0.0.1:0", "--num_workers", str(_NUM_WORKERS), *own) as server,
        Client.connect([server.endpoint], keys, role=Role.FIRST_WORKER, patience=Patience(60.0, 2)) as client,
    ):
        client.join(_BODY)
        for spec in (SPEC, BIG, TRAINED):
            client.create_table(spec)
        client.pull(SPEC.name, np.arange(200_000)).result()
        for start in range(0, _ROWS_OF_BIG, 100_000):
            client.pull(BIG.name, np.arange(start, start + 100_000)).result()
        yield server, client


def under(name: str, chosen: argparse.Namespace, key_dir: str | None) -> dict[str, Any]:
    """One attack, and the same time without it: half before, half behind."""
    with served(key_dir) as (server, client), contextlib.closing(Training(chosen, server, key_dir, client)) as training:
        client.push(SPEC.name, [1], np.ones((1, SPEC.dim), np.float32)).result()
        waits(client, 1.0, chosen.keys_per_pull)
        rest, steps = measured(client, training, chosen.seconds / 2, chosen)
        memory = Memory(server.pid)
        arguments = [name, server.endpoint, str(chosen.seconds), *([key_dir] if key_dir else [])]
        attack = subprocess.Popen([sys.executable, "-m", "benchmarks.abuse_attacks", *arguments])
        time.sleep(1.0)  # its imports
        try:
            during, steps_during = measured(client, training, chosen.seconds, chosen)
        finally:
            status = attack.wait(60)
            held = memory.stop()
        if status:
            raise SystemExit(f"the attack '{name}' ended with status {status}: nothing was measured")
        time.sleep(0.5)
        after, steps_after = measured(client, training, chosen.seconds / 2, chosen)
        stats = client.stats()[0]
        grown = stats["tables"][BIG.name]["rows"] - _ROWS_OF_BIG
        is_alive = server.returncode is None
    p99 = {"rest": float(np.percentile(rest + after, 99)), "attack": float(np.percentile(during, 99))}
    return {
        "p99_ms": p99["attack"],
        "p99_rest_ms": p99["rest"],
        "p99_ratio": p99["attack"] / max(p99["rest"], chosen.floor_ms),
        "max_ms": max(during),
        "held_bytes": held,
        "new_rows": grown,
        "clients": stats["clients"],
        "survived": is_alive,
        **({"steps_ratio": 2 * steps_during / (steps + steps_after)} if chosen.training else {}),
    }


def measured(
    client: Client, training: Training, seconds: float, chosen: argparse.Namespace
) -> tuple[list[float], float]:
    """The honest client's waits, and the steps per second of the workers that train."""
    begun, before = time.monotonic(), training.num_steps()
    found = waits(client, seconds, chosen.keys_per_pull)
    return found, (training.num_steps() - before) / (time.monotonic() - begun)


def main() -> None:
    chosen = options()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        key_dir = str(Path(folder) / "keys")
        keygen(key_dir)
        for name in chosen.only.split(","):
            found[name] = under(name, chosen, key_dir if name.startswith("handshake") else None)
            numbers = {key: round(value, 2) for key, value in found[name].items()}
            log(f"  {name}: {numbers}")
    held = [figures["held_bytes"] for name, figures in found.items() if name != "fresh_keys"]  # those are rows
    result = {
        "p99_ratio": max(figures["p99_ratio"] for figures in found.values()),
        "held_bytes_max": max(held, default=0),
        "survived": all(figures["survived"] for figures in found.values()),
        "training": chosen.training,
        "attacks": found,
    }
    report(result, chosen.json)


if __name__ == "__main__":
    main()
