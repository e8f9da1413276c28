"""A fleet that trains, as fleetrun starts it on one machine or on several: its processes, and who is primary."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.etcd import started_etcd
from benchmarks.chaos.machines import Machines, machines
from benchmarks.chaos.progress import Board
from benchmarks.chaos.small_disk import SmallDisk, small_disk
from torchfleet.ps.coordination.coordinators import VARIABLE, make_coordinator
from torchfleet.ps.coordination.view import Coordinator, View

ROOT = Path(__file__).parents[2]
_JOB = Path(__file__).with_name("job.py")
_PORT = 7000
_WAIT = 240.0  # seconds for what takes seconds, on machines that have much else to do
_START = 600.0  # the same for the first start, which may compile kernels
_MARGIN = 100  # steps from the order to end to the end, in modes whose workers step together
_RESTARTS = 1_000_000  # kills are many
_OWN = ("FLEET_", "PADDLE_", "TRAINING_ROLE", "POD_IP", "OMP_NUM_THREADS")
TOGETHER = ("sync", "hybrid")


class ChaosError(Exception):
    """The fleet did not do what it must."""


@dataclass(frozen=True)
class Member:
    """A process of the fleet."""

    role: str
    index: int
    replica: int
    process: psutil.Process

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}" + (f".{self.replica}" if self.role == "server" else "")


class Fleet:
    def __init__(self, chosen: argparse.Namespace, mode: str, folder: Path, end: int) -> None:
        self.chosen, self.mode, self.folder = chosen, mode, folder
        self.board = Board(folder, end)
        self.machines: Machines | None = None
        self.disk: SmallDisk | None = None
        self._pool: ThreadPoolExecutor | None = None  # its thread talks as machine 0
        self._coordinator: Coordinator | None = None
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, stack: contextlib.ExitStack) -> None:
        chosen, more = self.chosen, []
        if chosen.has_disk:
            self.disk = stack.enter_context(small_disk(self.folder / "disk"))
            more += ["--log_store", str(self.disk.folder)]
        if not chosen.has_links:
            counts = ["--server_num", str(chosen.servers), "--worker_num", str(chosen.workers)]
            self._launch(stack, [], [*counts, *more], {})
            return
        self.machines = stack.enter_context(machines(1 + chosen.servers))
        addresses = self.machines.addresses
        pool = ThreadPoolExecutor(1, initializer=self.machines.enter, initargs=(0,))
        self._pool = stack.enter_context(pool)
        lists = ["--servers", ",".join(f"{address}:{_PORT}" for address in addresses[1:])]
        lists += ["--workers", f"{addresses[0]}:0*{chosen.workers}", "--insecure"]
        if chosen.replicas == 2:
            place = stack.enter_context(started_etcd(self.machines, self._as_machine))
            more += ["--coordinator", f"etcd://{place}/chaos"]
        for number, address in enumerate(addresses):
            self._launch(stack, self.machines.inside(number), [*lists, *more], {"POD_IP": address})

    def _launch(
        self, stack: contextlib.ExitStack, before: list[str], options: list[str], variables: dict[str, str]
    ) -> None:
        chosen, log_dir = self.chosen, self.folder / f"log-{len(self.launchers)}"
        kept = ["--replicas", "2"] if chosen.replicas == 2 else []
        kept += ["--durability", "log"] if chosen.durability else []
        options = [*options, *kept, "--max_restart", str(_RESTARTS), "--log_dir", str(log_dir)]
        job = ["--mode", self.mode, "--board", str(self.folder), "--seed", str(chosen.seed)]
        job += ["--save_every", str(chosen.save_every)]
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "torchfleet.launch", *options, str(_JOB), *job],
            # Members are found by their environment, which forked servers have from the process that forked them.
            env={**own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLEET_FORK_SERVERS": "0", **variables},
            stdout=(self.folder / f"fleetrun-{len(self.launchers)}").open("wb"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.launchers.append(process)
        stack.callback(_end, process)

    def members(self) -> list[Member]:
        """All processes that run, stopped ones too."""
        found = []
        for launcher in self.launchers:
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(launcher.pid).children():
                    with contextlib.suppress(psutil.Error, KeyError):
                        found.append(_member(process))
        return found

    def member(self, role: str, index: int, replica: int = 0) -> Member | None:
        wanted = (role, index, replica)
        return next((each for each in self.members() if (each.role, each.index, each.replica) == wanted), None)

    def view(self, shard: int) -> View | None:
        if self._coordinator is None:
            servers = [each for each in self.members() if each.role == "server"]
            if not servers:
                return None
            self._coordinator = make_coordinator(servers[0].process.environ()[VARIABLE])
        view: View | None = self._as_machine(partial(self._coordinator.read, shard))
        return view

    def _as_machine(self, ask: Callable[[], Any]) -> Any:
        return ask() if self._pool is None else self._pool.submit(ask).result()

    def wait(self, is_so: Callable[[], object], what: str, seconds: float = _WAIT) -> None:
        """Raises ChaosError if it is not so in time, or the job ends meanwhile."""
        deadline = time.monotonic() + seconds
        while not is_so():
            codes = [launcher.poll() for launcher in self.launchers]
            if any(code is not None for code in codes):
                raise ChaosError(f"waiting for {what}, but fleetrun ended with {codes}:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"no {what} after {seconds:g} s:\n{self.last_words()}")
            time.sleep(0.005)

    def wait_for_steps(self, num: int) -> None:
        """Wait until every worker has begun this many more steps."""
        before = self.board.num_steps()
        wanted = [steps + num for steps in before] + [num] * (self.chosen.workers - len(before))
        self.wait(lambda: _reached(self.board.num_steps(), wanted), f"{num} more steps of every worker")

    def finish(self) -> dict[str, Any]:
        """Let the workers end; what the first of them found."""
        if not self.board.end:
            self.board.end = max(self.board.num_steps()) + _MARGIN if self.mode in TOGETHER else 1
        deadline = time.monotonic() + _WAIT
        while any(launcher.poll() is None for launcher in self.launchers):
            if time.monotonic() > deadline:
                raise ChaosError(f"the job does not end after {_WAIT:g} s:\n{self.last_words()}")
            time.sleep(0.05)
        codes = [launcher.returncode for launcher in self.launchers]
        if any(codes):
            raise ChaosError(f"fleetrun ended with {codes}:\n{self.last_words()}")
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def logs(self) -> list[Path]:
        return sorted([*self.folder.glob("fleetrun-*"), *self.folder.glob("log-*/latest/*log.*")])

    def last_words(self) -> str:
        texts = []
        for path in self.logs():
            lines = path.read_text(errors="replace").splitlines()[-12:]
            texts.append("\n".join([f"--- {path.relative_to(self.folder)}", *lines]))
        return "\n".join(texts)

    def keep_logs(self) -> None:
        if self.chosen.logs:
            for path in self.logs():
                kept = Path(self.chosen.logs) / f"{self.folder.name}-{path.relative_to(self.folder).parts[0]}"
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept / path.name)


@contextlib.contextmanager
def fleet(chosen: argparse.Namespace, mode: str, end: int = 0) -> Iterator[Fleet]:
    """A fleet that has begun to train. No process, namespace, mount or file of it is left.

    `end`: the number of steps of each worker, if it is known.
    """
    with tempfile.TemporaryDirectory(prefix=f"chaos-{mode}-") as name, contextlib.ExitStack() as stack:
        made = Fleet(chosen, mode, Path(name), end)
        stack.callback(made.keep_logs)
        made.start(stack)
        made.wait(lambda: len(made.board.num_steps()) == chosen.workers, "first step of every worker", _START)
        yield made


def _member(process: psutil.Process) -> Member:
    found = process.environ()
    role = found["FLEET_ROLE"].lower()
    index = int(found["FLEET_SERVER_INDEX" if role == "server" else "FLEET_WORKER_INDEX"])
    return Member(role, index, int(found.get("FLEET_REPLICA", "0")), process)


def _reached(steps: list[int], wanted: list[int]) -> bool:
    return len(steps) == len(wanted) and all(a >= b for a, b in zip(steps, wanted, strict=True))


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """fleetrun ends its processes, stopped ones too."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(15)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait(10)
