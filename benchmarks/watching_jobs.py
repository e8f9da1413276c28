"""The jobs of benchmarks.watching: unwatched roles, and fleetrun with all that watches a job."""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from benchmarks.watching_board import Board
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.privacy import kind_of, private_folder
from torchfleet.launch.roles import free_ports, one_machine, tasks

_WORKER = Path(__file__).with_name("watching_worker.py")
_START = 300.0  # seconds that a job may take until all its workers train, with kernels to compile
_END = 60.0  # and until it has ended
_MOST_SHOWN = 1 << 16  # bytes of the terminal in which the address of the page is looked for
_SCRAPE = 1.0  # seconds between two scrapes of a process, on average
CORES = "WATCHING_CORES"  # the cores of all roles, two for each
HAS_TRACES = find_spec("opentelemetry") is not None and find_spec("opentelemetry.exporter") is not None


@dataclass(frozen=True)
class Look:
    """A job at one moment: sums since its start."""

    time: float
    roles_s: float  # processor time of servers and workers
    fleetrun_s: float
    steps: float

    @property
    def processor_s(self) -> float:
        return self.roles_s + self.fleetrun_s

    def since(self, before: Look) -> Look:
        names = ("time", "roles_s", "fleetrun_s", "steps")
        return Look(*(getattr(self, name) - getattr(before, name) for name in names))


@dataclass
class Job:
    """A job that runs. `fleetrun`: its process; None if the job is unwatched."""

    board: Board
    num_servers: int
    folder: Path
    processes: list[subprocess.Popen[bytes]]
    fleetrun: int = 0
    num_read: dict[str, int] = field(default_factory=dict)  # bytes that those who watch have got, by where

    def look(self, with_fleetrun: bool = True) -> Look:
        pids = [int(pid) for pid in self.board.of("pid")]
        own = processor_seconds(self.fleetrun) if self.fleetrun and with_fleetrun else 0.0
        steps = sum(self.board.of("steps", self.num_servers))
        return Look(time.perf_counter(), sum(processor_seconds(pid) for pid in pids), own, steps)

    def wait_until(self, field: str, value: float) -> None:
        """Until this number of all workers is at least that."""
        deadline = time.monotonic() + _START
        while min(self.board.of(field, self.num_servers)) < value:
            self.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"the job takes too long:\n{self.logs()}")
            time.sleep(0.02)

    def check(self) -> None:
        """Raises SystemExit if a process has failed."""
        if any(process.poll() for process in self.processes):
            raise SystemExit(f"the job has failed:\n{self.logs()}")

    def watch(self, wanted: bool) -> None:
        """Let servers and workers be watched, or not, and wait until all have followed."""
        self.board.order("on", float(wanted))
        deadline = time.monotonic() + _START
        while set(self.board.of("is_on")) != {float(wanted)}:
            if time.monotonic() > deadline:
                raise SystemExit(f"a process does not follow the switch: {self.board.of('is_on')}")
            time.sleep(0.002)

    def end(self) -> None:
        self.board.order("stop", 1.0)
        for process in self.processes:
            if process.wait(_END):
                raise SystemExit(f"a process ended with {process.returncode}:\n{self.logs()}")
        if not all(self.num_read.values()):
            raise SystemExit(f"the dashboard's client read nothing: {self.num_read}")

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("**/*log.*")))


def processor_seconds(pid: int) -> float:
    """Of a process and all its threads, in user and system mode, to the nanosecond: its clock, as clock_getcpuclockid
    makes the number of it."""
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def own_cores(num_roles: int) -> Iterator[bool]:
    """Pin servers and workers to two cores each, and everything else to the others. Yields False if there are fewer."""
    before = os.sched_getaffinity(0)
    cores = sorted(before, key=lambda core: (_siblings(core), core))
    if len(cores) < 2 * num_roles + 2:
        yield False
        return
    os.environ[CORES] = ",".join(str(core) for core in cores[: 2 * num_roles])
    os.sched_setaffinity(0, cores[2 * num_roles :])
    try:
        yield True
    finally:
        os.sched_setaffinity(0, before)
        del os.environ[CORES]


def _siblings(core: int) -> str:
    """What cores that are one to the hardware have in common."""
    with contextlib.suppress(OSError):
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text().strip().zfill(20)
    return ""


def script(options: argparse.Namespace, steps: int, board: Path) -> list[str]:
    settings = {"batch": options.batch, "num_ids": options.num_ids, "steps": steps, "board": board}
    return [str(_WORKER), *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]


@contextlib.contextmanager
def unwatched(options: argparse.Namespace, steps: int) -> Iterator[Job]:
    """The roles as processes, without a launcher."""
    layout = one_machine(options.servers, options.workers)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        board = Board(folder / "board", options.servers + options.workers)
        command = [sys.executable, *script(options, steps, folder / "board")]
        spec = JobSpec(tuple(command), folder)
        private = stack.enter_context(private_folder(spec, layout, kind_of(spec, layout, None, False)))
        job = Job(board, options.servers, folder, [])
        for task in tasks(layout, options.workers, private.environment):
            log = stack.enter_context(open(folder / task.log_name, "wb"))
            environment = {**os.environ, **task.environment, "OMP_NUM_THREADS": "1"}
            job.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            stack.callback(job.processes[-1].kill)
        yield job
        job.end()


@contextlib.contextmanager
def watched(options: argparse.Namespace, steps: int) -> Iterator[Job]:
    """fleetrun on a terminal, with a dashboard and its client, scrapes, event files, and traces where there is
    opentelemetry."""
    num = options.servers + options.workers
    page, metrics = free_ports(1)[0], first_of_free(num)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        board = Board(folder / "board", num)
        board.order("on", 1.0)
        command = [sys.executable, "-m", "torchfleet.launch", "--log_dir", name]
        command += ["--server_num", str(options.servers), "--worker_num", str(options.workers)]
        command += ["--dashboard", str(page), "--metrics_port", str(metrics), "--tensorboard", f"{name}/events"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        num_read: dict[str, int] = {}
        if HAS_TRACES:
            command += ["--trace_every", str(options.trace_every)]
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = stack.enter_context(collector(num_read))
        command += script(options, steps, folder / "board")
        ours, theirs = pty.openpty()
        stack.callback(os.close, ours)
        fleetrun = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        job = Job(board, options.servers, folder, [fleetrun], fleetrun.pid, num_read)
        stack.enter_context(ended(fleetrun))
        roles = [f"http://127.0.0.1:{metrics + i}/metrics" for i in range(num)]
        token = stack.enter_context(reading(ours, num_read))
        stack.enter_context(asking(f"http://127.0.0.1:{page}/events", roles, token, board, num_read))
        yield job
        job.end()


@contextlib.contextmanager
def ended(fleetrun: subprocess.Popen[bytes]) -> Iterator[None]:
    """It has ended behind this, with all that it started, however the block ends."""
    try:
        yield
    finally:
        if fleetrun.poll() is None:
            fleetrun.terminate()
            fleetrun.wait(_END)


def first_of_free(num: int) -> int:
    """A port behind which others are free, too."""
    for port in range(21000, 31000, num):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for i in range(num):
                stack.enter_context(socket.create_server(("127.0.0.1", port + i)))
            return port
    raise SystemExit(f"found no {num} free ports in a row")


@contextlib.contextmanager
def reading(terminal: int, num_read: dict[str, int]) -> Iterator[Callable[[], str]]:
    """Somebody reads what the terminal shows. Yields what asks for the token of the dashboard, as it is shown."""
    num_read["terminal"], first = 0, bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while got := os.read(terminal, 1 << 16):
                num_read["terminal"] += len(got)
                if len(first) < _MOST_SHOWN:
                    first.extend(got)

    def token() -> str:
        found = re.search(rb"#token=([A-Za-z0-9_-]+)", first)
        return found[1].decode() if found else ""

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    yield token
    reader.join(5)


@contextlib.contextmanager
def asking(
    page: str, roles: list[str], token: Callable[[], str], board: Board, num_read: dict[str, int]
) -> Iterator[None]:
    """A page that is open, and a scrape of every role each second while the job is watched."""
    over = threading.Event()
    num_read |= dict.fromkeys((page, *roles), 0)

    def ask(url: str) -> None:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token()}"} if url == page else {})
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as reply:
            while (got := reply.read1(1 << 16)) and not over.is_set():
                num_read[url] += len(got)

    def keep_asking(url: str) -> None:
        while not over.wait(_SCRAPE * random.uniform(0.5, 1.5)):  # at no fixed distance from the switches
            if board.ordered("on") > 0:
                ask(url)

    threads = [threading.Thread(target=keep_asking, args=(url,), daemon=True) for url in (page, *roles)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(10)


@contextlib.contextmanager
def collector(num_read: dict[str, int]) -> Iterator[str]:
    """An address at which spans are taken and forgotten."""
    num_read["spans"] = 0

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            num_read["spans"] += len(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing to say."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
