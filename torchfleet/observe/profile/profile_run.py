"""Requests a profile from the processes of a job, and waits for their files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchfleet.base.errors import FleetError
from torchfleet.base.tracing.profile_folder import Begin, Part, ProfileRequest, read, write
from torchfleet.observe.profile.torch_events import TorchTrace

_LOOK = 0.1  # seconds between two looks into the folder
_LAST_ONE = 5.0  # seconds without a newcomer, after which no more workers are expected on this machine
_AHEAD = 0.3  # seconds from writing begin.json until the workers begin
_SERVERS = 10.0  # seconds that servers have for writing their parts

Ended = Callable[[], int | None]


class ProfileRun:
    """One request, from its file to the parts. The context removes all of its files on exit."""

    def __init__(self, root: Path, request: ProfileRequest, ended: Ended, timeout: float) -> None:
        """`ended`: returns the exit status of the job, or None while it runs."""
        self._root, self._request, self._ended = root, request, ended
        self._folder = root / request.id
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout

    def __enter__(self) -> ProfileRun:
        self._root.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir()
        write(self._root / "request.json", self._request)
        return self

    def __exit__(self, *_: object) -> None:
        (self._root / "request.json").unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def parts(self) -> list[Part]:
        """Block until all workers have written their parts, then for a limited time until all servers have. Returns the
        parts. Raises FleetError if the job ends before all workers have written theirs, or after the timeout."""
        workers = self._wait_for_workers()
        if self._ended() is None:
            write(self._folder / "begin.json", Begin(time.time_ns() + int(_AHEAD * 1e9)))
        made = self._wait_for_parts(workers)
        (self._folder / "end").touch()
        return made + self._wait_for_servers()

    def torch_traces(self, parts: Sequence[Part]) -> dict[str, TorchTrace]:
        """What torch.profiler saw, by the name of the process."""
        paths = {part.name: (self._folder / f"{part.role}.{part.index}.torch.json", part.pid) for part in parts}
        return {name: TorchTrace(path, pid) for name, (path, pid) in paths.items() if path.exists()}

    def _wait_for_workers(self) -> list[Part]:
        """Block until the workers are ready: all of the job, or all of this machine if no more appear."""
        num_before, since = 0, time.monotonic()
        while True:
            over = self._is_over()
            here, ready = self._found("here"), self._found("ready")
            if len(here) != num_before:
                num_before, since = len(here), time.monotonic()
            is_all = bool(here) and (len(here) >= here[0].num_workers or time.monotonic() - since > _LAST_ONE)
            if is_all and len(ready) == len(here):
                return ready
            _pause(over, f"{len(here)} workers have seen the request, {len(ready)} are ready. A worker looks for it at "
                         f"the end of a step, and is ready after {self._request.skip} more (--skip)")  # fmt: skip

    def _wait_for_parts(self, workers: Sequence[Part]) -> list[Part]:
        while True:
            over = self._is_over()
            made = self._found("part.json")
            if len(made) >= len(workers):
                return made
            _pause(over, f"{len(made)} of {len(workers)} workers have made their {self._request.steps} steps")

    def _wait_for_servers(self) -> list[Part]:
        servers, deadline = self._found("here", is_server=True), time.monotonic() + _SERVERS
        while len(made := self._found("part.json", is_server=True)) < len(servers):
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK)
        return made

    def _found(self, ending: str, is_server: bool = False) -> list[Part]:
        found = [read(path, Part) for path in sorted(self._folder.glob(f"*.{ending}"))]
        return [part for part in found if part is not None and (part.role == "server") == is_server]

    def _is_over(self) -> str:
        """Return why no more files will come, or "" while some may. The caller looks for files after this call: a job
        that has ended has written all of its files."""
        code = self._ended()
        if code is not None:
            return f"the job has ended with status {code} before its profile was complete"
        return f"no profile after {self._timeout:g} s (--timeout)" if time.monotonic() > self._deadline else ""


def _pause(over: str, state: str) -> None:
    """Wait until the next look into the folder. Raises FleetError if it would find no more than this one."""
    if over:
        raise FleetError(f"{over}: {state}")
    time.sleep(_LOOK)
