"""What watching costs: the same job with nobody looking, and with everything switched on, in turns.

python -m benchmarks.watching --json            2 servers x 4 workers, async, five rounds; about four minutes
python -m benchmarks.watching --quick --json    shorter, to see that it works

`unwatched` starts the roles without a launcher: no status file, no display, no record. `watched` is fleetrun on a
terminal, with --dashboard and a page that is open, --metrics_port and a scrape of every role each second, and
--tensorboard. Both report their loss every tenth step. The processor time of a step is told beside the speed: where
cores are shared it moves less than the speed does. `watched_fleetrun` is the share of a core that fleetrun itself uses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.timing import log, report
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.privacy import kind_of, private_folder
from torchfleet.launch.roles import free_ports, one_machine, tasks

_WORKER = Path(__file__).with_name("sparse_worker.py")
_MOST = 600  # seconds of one run
Found = list[dict[str, Any]]  # what each worker measured


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("servers", 2), ("workers", 4), ("batch", 512), ("num_ids", 1_000_000), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=15.0, help="time of one run, after a first pass")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.num_ids, chosen.seconds, chosen.rounds = 100_000, 3.0, 1
    return chosen


def script(chosen: argparse.Namespace) -> list[str]:
    settings = {name: getattr(chosen, name) for name in ("batch", "num_ids", "seconds")}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [str(_WORKER), *words, "--num_batches", "160", "--report_every", "10"]


def unwatched(chosen: argparse.Namespace) -> Found:
    """The roles as processes, without a launcher."""
    layout = one_machine(chosen.servers, chosen.workers)
    command = [sys.executable, *script(chosen)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        job = JobSpec(tuple(command), Path(folder))
        private = stack.enter_context(private_folder(job, layout, kind_of(job, layout, None, False)))
        running = []
        for task in tasks(layout, chosen.workers, private.environment):
            log_file = stack.enter_context(open(Path(folder) / task.log_name, "wb"))
            environment = {**os.environ, **task.environment, "OMP_NUM_THREADS": "1"}
            running.append(subprocess.Popen(command, env=environment, stdout=log_file, stderr=subprocess.STDOUT))
            stack.callback(running[-1].kill)
        for process in running:
            process.wait(_MOST)
        return results(Path(folder), chosen.workers)


def watched(chosen: argparse.Namespace) -> Found:
    """fleetrun on a terminal, with all that watches a job."""
    page, metrics = free_ports(1)[0], first_of_free(chosen.servers + chosen.workers)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", folder]
        command += ["--server_num", str(chosen.servers), "--worker_num", str(chosen.workers)]
        command += ["--dashboard", str(page), "--metrics_port", str(metrics), "--tensorboard", f"{folder}/events"]
        ours, theirs = pty.openpty()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        job = subprocess.Popen([*command, *script(chosen)], env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        stack.callback(os.close, ours)
        stack.callback(job.kill)
        reads = {f"http://127.0.0.1:{metrics + i}/metrics" for i in range(chosen.servers + chosen.workers)}
        with reading(ours), asking(f"http://127.0.0.1:{page}/events", reads) as num_read:
            share = processor_share(job)
        if not all(num_read.values()):
            raise SystemExit(f"nobody looked: {num_read}")
        return [{**found, "fleetrun": share} for found in results(Path(folder) / "latest", chosen.workers)]


def processor_share(job: subprocess.Popen[bytes]) -> float:
    """Wait for fleetrun to end. Returns the share of a core that it used itself, the processes it started left out."""
    looked, start = psutil.Process(job.pid), time.monotonic()
    share = 0.0
    while job.poll() is None:
        if time.monotonic() - start > _MOST:
            raise SystemExit("the watched run takes too long")
        with contextlib.suppress(psutil.Error):
            used = looked.cpu_times()
            share = (used.user + used.system) / max(1.0, time.monotonic() - start)
        time.sleep(0.5)
    return share


def first_of_free(num: int) -> int:
    """A port behind which others are free, too."""
    for port in range(21000, 31000, num):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for i in range(num):
                stack.enter_context(socket.create_server(("127.0.0.1", port + i)))
            return port
    raise SystemExit(f"found no {num} free ports in a row")


@contextlib.contextmanager
def reading(terminal: int) -> Iterator[None]:
    """Somebody reads what the terminal shows."""

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while os.read(terminal, 1 << 16):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    yield
    reader.join(5)


@contextlib.contextmanager
def asking(page: str, roles: set[str]) -> Iterator[dict[str, int]]:
    """A page that is open, and a scrape of every role each second. Yields how many bytes each has given."""
    over, num_read = threading.Event(), dict.fromkeys((page, *roles), 0)

    def ask(url: str, period: float) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
                while (got := reply.read1(1 << 16)) and not over.is_set():
                    num_read[url] += len(got)
            over.wait(period)

    threads = [threading.Thread(target=ask, args=(url, 1.0), daemon=True) for url in num_read]
    for thread in threads:
        thread.start()
    yield num_read
    over.set()
    for thread in threads:
        thread.join(10)


def results(folder: Path, num_workers: int) -> Found:
    logs = [path.read_text() for path in folder.glob("workerlog.*")]
    found = [json.loads(line) for text in logs for line in re.findall(r"RESULT (\{.*\})", text)]
    if len(found) != num_workers:
        raise SystemExit("a run failed:\n" + "\n".join(text[-2000:] for text in logs))
    return found


def main() -> None:
    chosen = options()
    contenders: dict[str, Callable[[argparse.Namespace], Found]] = {"unwatched": unwatched, "watched": watched}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for turn in range(chosen.rounds):
        for name in (list(contenders), list(contenders)[::-1])[turn % 2]:  # who comes first changes
            found = contenders[name](chosen)
            means = {key: statistics.fmean(worker[key] for worker in found) for key in ("cpu_ms", "step_ms", "loss")}
            means |= {key: found[0][key] for key in ("fleetrun",) if key in found[0]}
            rounds[name].append({"samples_per_s": sum(worker["samples_per_s"] for worker in found), **means})
            told = rounds[name][-1]
            speed, cpu = f"{told['samples_per_s']:,.0f} samples/s", f"{told['cpu_ms']:.3f} ms of processor a step"
            log(f"  round {turn + 1}/{chosen.rounds}: {name}: {speed}, {cpu}")
    medians = {
        name: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for name, runs in rounds.items()
    }
    pairs = zip(rounds["watched"], rounds["unwatched"], strict=True)
    ratios = [one["samples_per_s"] / other["samples_per_s"] for one, other in pairs]
    result: dict[str, Any] = {f"{name}_{key}": value for name, found in medians.items() for key, value in found.items()}
    result["speed_ratio"] = statistics.median(ratios)
    result["speed_ratios"] = [round(ratio, 4) for ratio in ratios]
    result["cpu_ratio"] = medians["watched"]["cpu_ms"] / medians["unwatched"]["cpu_ms"]
    report({**result, "rounds": chosen.rounds, "servers": chosen.servers, "workers": chosen.workers}, chosen.json)


if __name__ == "__main__":
    main()
