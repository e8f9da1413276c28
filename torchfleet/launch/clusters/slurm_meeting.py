"""How the tasks of a step find each other: by files in a folder of the shared file system that only this user can open.

LOG_DIR/slurm-JOB.STEP/    mode 0700; a new folder each time that the job is requeued
    server.N               host:port of server N, written by its task
    keys/                  the keys of this step, made by the task with rank 0
    serverlog.N workerlog.N
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.base.ownership import make_own
from torchfleet.launch.clusters.slurm_step import SlurmStep
from torchfleet.launch.roles import free_ports
from torchfleet.ps.net.keys import keygen

_PAUSE = 0.2  # seconds between two polls of the folder: a shared file system may be slow
_PERIOD = 5.0  # seconds between two messages about a wait


class SlurmMeeting:
    """The folder of a step, as one of its tasks uses it. Raises RoleError if it cannot be created, SecurityError if
    other users have access to it."""

    def __init__(self, log_dir: Path, step: SlurmStep, timeout: float) -> None:
        self.folder = log_dir.absolute() / step.name
        self._step, self._timeout = step, timeout
        try:
            make_own(self.folder)
        except OSError as error:
            raise RoleError(
                f"cannot make {self.folder}: {error}. All nodes need the same folder (--log_dir)."
            ) from None

    def publish(self, name: str, kind: int) -> str:
        """Choose a free host:port on this node, publish it to the other tasks as `name`, and return it. Calls
        with different values of `kind` try different ports."""
        address = self._step.own_address()
        place = f"{f'[{address}]' if ':' in address else address}:{self._free_port(kind)}"
        unfinished = self.folder / f".{name}.{os.getpid()}"
        unfinished.write_text(f"{place}\n")
        os.replace(unfinished, self.folder / name)
        return place

    def places(self, names: list[str]) -> list[str]:
        """Return the addresses published under these names. Blocks until all are there: tasks start in any order."""
        self._wait(lambda: [name for name in names if not (self.folder / name).exists()])
        return [(self.folder / name).read_text().strip() for name in names]

    def keys(self) -> str:
        """Return the folder of keys. Rank 0 creates it; the other ranks block until it exists."""
        made = self.folder / "keys"
        if self._step.rank == 0 and not made.exists():
            unfinished = self.folder / f".keys.{os.getpid()}"
            keygen(unfinished)
            os.rename(unfinished, made)  # atomic: all keys appear at once
        self._wait(lambda: [] if made.exists() else ["keys"])
        return str(made)

    def remove_keys(self) -> None:
        """Remove the keys at the end of rank 0, when no other task needs them. In other ranks this does nothing."""
        if self._step.rank == 0:
            shutil.rmtree(self.folder / "keys", ignore_errors=True)

    def _free_port(self, kind: int) -> int:
        """Return the first free port after one derived from the job: jobs on one node try different ports."""
        seed = hashlib.blake2b(f"{self._step.name} {kind}".encode(), digest_size=8).digest()
        return free_ports(1, int.from_bytes(seed, "big"), host="")[0]

    def _wait(self, missing: Callable[[], list[str]]) -> None:
        started = time.monotonic()
        next_line = started + _PERIOD
        while names := missing():
            now = time.monotonic()
            what = f"{', '.join(names)} of {self.folder}"
            if now - started >= self._timeout:
                raise RoleError(
                    f"after {self._timeout:g} s (FLEET_START_TIMEOUT) there is no {what}. Do all tasks of the step "
                    "run, and see the same folder (--log_dir)?"
                )
            if now >= next_line:
                next_line = now + _PERIOD
                print(f"[fleetrun] waiting for {what}, {now - started:.0f} s", flush=True)
            time.sleep(_PAUSE)
            with contextlib.suppress(OSError):
                os.listdir(self.folder)  # makes NFS refresh its cache of the folder
