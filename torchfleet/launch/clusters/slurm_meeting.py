"""How the tasks of a step find each other: files in a folder of the shared file system, which only this user can enter.

LOG_DIR/slurm-JOB.STEP/    mode 0700; one more for every time that the job was requeued
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

_PAUSE = 0.2  # seconds between two looks at the folder: a shared file system may be slow
_PERIOD = 5.0  # seconds between two lines about what is waited for


class SlurmMeeting:
    """The folder of a step, as one of its tasks sees it. Raises RoleError if it cannot be made, SecurityError if it is
    not this user's alone."""

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
        """A place on this node that is free, told to the others as `name`; `kind` tells those of one job apart."""
        address = self._step.own_address()
        place = f"{f'[{address}]' if ':' in address else address}:{self._free_port(kind)}"
        unfinished = self.folder / f".{name}.{os.getpid()}"
        unfinished.write_text(f"{place}\n")
        os.replace(unfinished, self.folder / name)
        return place

    def places(self, names: list[str]) -> list[str]:
        """What the tasks of these names have published. Tasks start in any order: waits until all have."""
        self._wait(lambda: [name for name in names if not (self.folder / name).exists()])
        return [(self.folder / name).read_text().strip() for name in names]

    def keys(self) -> str:
        """The folder of keys. Rank 0 makes it, the others wait for it."""
        made = self.folder / "keys"
        if self._step.rank == 0 and not made.exists():
            unfinished = self.folder / f".keys.{os.getpid()}"
            keygen(unfinished)
            os.rename(unfinished, made)  # all of them are there, or none
        self._wait(lambda: [] if made.exists() else ["keys"])
        return str(made)

    def remove_keys(self) -> None:
        """Rank 0 does it at its end: nobody comes any more."""
        if self._step.rank == 0:
            shutil.rmtree(self.folder / "keys", ignore_errors=True)

    def _free_port(self, kind: int) -> int:
        """Derived from the job, so that jobs on one node try different ones; the first that can be taken."""
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
                os.listdir(self.folder)  # NFS keeps what it knows of a folder for a while
