"""The folder in which profiles are requested and in which the processes of a job write their parts.

request.json              the request; the processes of a job look for it twice a second
ID/ROLE.N.here            this process takes part
ID/ROLE.N.ready           of a worker: it is ready to begin
ID/begin.json             when all workers begin; written when all are ready
ID/ROLE.N.part.json       the spans of the process; beside it ROLE.N.torch.json, the output of torch.profiler
ID/end                    all workers have written their parts; servers now write theirs
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from torchfleet.base.errors import FleetError
from torchfleet.base.prepared_types import prepared
from torchfleet.base.tracing.span import Span

VARIABLE = "FLEET_PROFILE"
NAME = ".profile"  # the folder beside the logs of a run
LOOK = 0.5  # seconds between two checks for a request
MOST_STEPS = 10_000  # in one profile
_ID = re.compile("[0-9a-f]{16}")
_MAX_BYTES = 1 << 16  # size limit of a request
LIFE = 600.0  # seconds after which a request expires, unless it says otherwise

Body = TypeVar("Body")


_Steps = Annotated[int, msgspec.Meta(ge=0, le=MOST_STEPS)]


class ProfileRequest(msgspec.Struct):
    """Requests steps `skip` to `skip + steps` of every worker, counted from when the worker reads the request."""

    id: str
    steps: _Steps
    skip: _Steps
    with_torch: bool
    until: float  # seconds since 1970: no process begins later


class Begin(msgspec.Struct):
    """Every worker begins with its first step after `at`, nanoseconds since 1970."""

    at: int


class Offset(msgspec.Struct):
    """How far the clock of a server's process is ahead of the writer's clock, measured by its fastest request."""

    process: int
    round_trip: int
    ahead: int


class Part(msgspec.Struct):
    """One process's part of a profile."""

    role: str
    index: int
    num_workers: int
    num_servers: int
    host: str
    machine: str  # the boot id of the machine: processes with the same one share a clock
    pid: int
    process: int  # the number by which other processes identify this one
    mode: str
    spans: list[Span] = []
    offsets: list[Offset] = []
    num_dropped: int = 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


def new_request(
    steps: int, skip: int, with_torch: bool, now: float | None = None, life: float = LIFE
) -> ProfileRequest:
    """`life`: seconds during which processes may begin."""
    until = (time.time() if now is None else now) + life
    return ProfileRequest(secrets.token_hex(8), steps, skip, with_torch, until)


def machine_number() -> str:
    """Unique for every machine and every boot of it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def write(path: Path, body: object) -> None:
    """Replace the file atomically: a reader never sees partial contents. Does not follow a link at `path`."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
    unfinished.unlink(missing_ok=True)
    with open(unfinished, "xb") as file:
        file.write(msgspec.json.encode(body))
    os.replace(unfinished, path)


def read(path: Path, expected: type[Body]) -> Body | None:
    """Read a file; None if it does not exist. Raises FleetError if it has other contents than `expected`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=prepared(expected))
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise FleetError(f"{path} should hold a {expected.__name__} of a profile, and does not: {error}") from None


class ProfileFolder:
    """A process's view of the folder. Without a folder, `root` is None and there are no requests."""

    def __init__(self, root: Path | None) -> None:
        self._root, self._seen = root, ""
        self._next = 0.0

    def look(self) -> ProfileRequest | None:
        """A request that is new to this process, or None. Checks the folder at most once per period."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + LOOK
        path = None if self._root is None else self._root / "request.json"
        try:
            if path is None or not _may_ask(path.lstat()):
                return None
            found = read(path, ProfileRequest)
        except (FleetError, OSError):
            return None  # not a request, or removed just now
        if found is None or found.id == self._seen or not _ID.fullmatch(found.id) or time.time() > found.until:
            return None
        self._seen = found.id
        return found

    def of(self, request: ProfileRequest) -> Path:
        """The folder for the parts of this profile. The requester has created it."""
        assert self._root is not None
        return self._root / request.id


def _may_ask(about: os.stat_result) -> bool:
    """Whether this is a small regular file of this user or root: not a link, nor a pipe that would block a reader."""
    is_small_file = stat.S_ISREG(about.st_mode) and about.st_size <= _MAX_BYTES
    return is_small_file and about.st_uid in (os.geteuid(), 0)


def folder_of(status_file: str | None) -> ProfileFolder:
    """The profile folder of this process: FLEET_PROFILE, or the one beside its status file."""
    given = os.environ.get(VARIABLE)
    if given:
        return ProfileFolder(Path(given))
    return ProfileFolder(Path(status_file).parent / NAME if status_file else None)
