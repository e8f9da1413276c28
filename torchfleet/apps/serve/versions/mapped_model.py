"""A saved model that several processes read from shared memory, and that follows the job that trains it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from torchfleet.apps.serve.versions.follow_process import (
    READERS,
    has_writer,
    is_locked,
    locked,
    start_writer,
    write_settings,
)
from torchfleet.apps.serve.versions.follower import FollowSettings
from torchfleet.apps.serve.versions.mapped_version import MappedVersion
from torchfleet.apps.serve.versions.version_description import CURRENT, read_current
from torchfleet.apps.serve.versions.version_store import Status, read_status
from torchfleet.base.errors import CheckpointError
from torchfleet.base.monitor.notices import tell
from torchfleet.base.own_folders import OwnFolder

Take = Callable[[MappedVersion], None]
LOOK = 0.05  # seconds between two looks for another version
GUARD = 1.0  # seconds between two looks for the writer
WAIT = 600.0  # seconds for the first version: a large model is read once
MOST_STARTS = 3  # of a writer that ends by an error, before there is a version
_TRIES = 100


class MappedModel:
    """The model in `folder`, which a writer fills: a ModelSource. Threads may share it."""

    def __init__(self, folder: Path, follow: bool, wait: float = WAIT) -> None:
        """Blocks until there is a version. Raises CheckpointError if the writer cannot make one."""
        self._folder, self._follow = folder, follow
        self._lock = self._hold()
        self._own: OwnFolder | None = None
        self._writer: subprocess.Popen[bytes] | None = None
        self._told = ""
        self._num_failed = 0  # writers that ended by an error
        self._over = threading.Event()
        self._swap = threading.Lock()
        self._take: Take | None = None
        self._refused = ""  # why the newest version did not become current
        try:
            self._version = self._first(wait)
            for table in self._version.description.tables:  # loads the kernels, so that no request waits for it
                self._version.rows(table, np.zeros(1, np.int64))
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._watch, name="model versions", daemon=True)
        self._thread.start()

    def current(self) -> MappedVersion:
        """As ModelSource.current."""
        return self._version

    def tell(self, take: Take) -> None:
        """As ModelSource.tell."""
        with self._swap:
            take(self._version)
            self._take = take

    def status(self) -> Status:
        """The writer's state, and the troubles that it has met."""
        return read_status(self._folder)

    @property
    def age(self) -> float:
        """Seconds since the newest training step that is in the current version (`model_age_seconds`)."""
        return max(0.0, time.time() - self._version.created)

    def figures(self) -> dict[str, float]:
        """Numbers for metrics, by name. Those that end in _total count since the writer began."""
        status = self.status()
        return {
            "model_version": self._version.number,
            "model_age_seconds": self.age,
            "follow_gaps_total": status.num_gaps,
            "follow_resyncs_total": status.num_resyncs,
            "follow_disk_full_total": status.num_disk_full,
            "follow_is_in_trouble": float(bool(status.trouble or self._told or self._refused)),
            "follow_pinned_version": status.pinned,
            "follow_checked_seconds_ago": max(0.0, time.time() - status.checked),
        }

    def close(self) -> None:
        """As ModelSource.close. The writer ends when no process reads its folder."""
        self._over.set()
        self._thread.join()
        self._release()
        if not is_locked(self._folder / READERS):
            self._end_writer()
        elif self._writer is not None:  # other processes need the writer; only this process can reap it
            threading.Thread(target=self._writer.wait, name="writer", daemon=True).start()
        if self._own is not None:
            self._own.close()

    def own(self, folder: OwnFolder) -> None:
        """Remove this folder at `close`."""
        self._own = folder

    def _hold(self) -> int:
        for _ in range(_TRIES):
            held = locked(self._folder / READERS, fcntl.LOCK_SH)
            if held is not None:
                return held
            time.sleep(0.02)  # the writer takes the lock for a moment to see whether there are readers
        raise CheckpointError(f"{self._folder / READERS} is locked by another process than a reader of versions")

    def _first(self, wait: float) -> MappedVersion:
        began, end = time.time(), time.monotonic() + wait
        while True:
            if (found := self._mapped(None)) is not None:
                return found
            if read_current(self._folder) is None:
                self._guard()
            status = self.status()
            if status.failed and status.checked > began:
                raise CheckpointError(status.failed)
            if self._num_failed > MOST_STARTS:
                raise CheckpointError(f"the process that writes versions to {self._folder} ends; stderr says why")
            if time.monotonic() > end:
                raise CheckpointError(f"no version of the model came to {self._folder} within {wait:g} s")
            time.sleep(LOOK)

    def _watch(self) -> None:
        seen: object = None
        guarded = time.monotonic()
        while not self._over.wait(LOOK):
            mark = self._mark()  # before the file is read, so that a replacement meanwhile is noticed
            if mark != seen and (found := self._next()) is not None:
                seen = mark
                if found.number != self._version.number:
                    self._make_current(found)
            if self._follow and time.monotonic() - guarded > GUARD:
                guarded = time.monotonic()
                self._guard()

    def _make_current(self, found: MappedVersion) -> None:
        """An error of the receiver is reported once, and the version that was current stays."""
        with self._swap:
            try:
                if self._take is not None:
                    self._take(found)
            except Exception as error:
                text = f"{found.description.source} cannot be served: {type(error).__name__}: {error}"
                if text != self._refused:
                    tell(f"torchfleet serve: {text.removesuffix('.')}. Version {self._version.number} stays.")
                self._refused = text
                return
            self._version, self._refused = found, ""

    def _next(self) -> MappedVersion | None:
        """As `_mapped`. An error is reported once, and the version that was mapped before stays."""
        try:
            found = self._mapped(self._version)
            self._told = ""
            return found
        except Exception as error:
            text = f"torchfleet serve: a new version cannot be mapped: {type(error).__name__}: {error}"
            if text != self._told:
                self._told = text
                tell(text)
            return None

    def _mapped(self, before: MappedVersion | None) -> MappedVersion | None:
        """The current version; None before the first version, or if it was replaced while it was opened."""
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            description = read_current(self._folder)
            return None if description is None else MappedVersion(self._folder, description, before)
        return None

    def _mark(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = os.stat(self._folder / CURRENT)
            return found.st_ino, found.st_mtime_ns
        return None

    def _guard(self) -> None:
        """Start a writer if the folder has no writer: at the beginning, and after the writer was killed."""
        if self._writer is not None and (status := self._writer.poll()) is None:
            return
        self._num_failed += self._writer is not None and status != 0
        if not has_writer(self._folder):
            self._writer = start_writer(self._folder)

    def _end_writer(self) -> None:
        """End the writer of a folder that no other process reads."""
        if self._writer is not None:
            self._writer.kill()  # it has nothing to finish: a later reader starts another
            self._writer.wait()

    def _release(self) -> None:
        os.close(self._lock)


def open_mapped(
    folder: str,
    follow: bool,
    workdir: str | None = None,
    servers: Sequence[str] = (),
    key_dir: str | None = None,
    settings: FollowSettings | None = None,
) -> MappedModel:
    """The model saved in `folder`, as a ModelSource that shares its memory with every process of the same `workdir`.

    `follow`: take over what a job saves there. `servers`: addresses of its servers, whose changes come within a second.
    `workdir`: an existing folder for the files of versions, the same for all processes that serve this model; None: a
    new one, for this process alone. `settings`: what to follow, in place of all arguments but `workdir`.
    """
    chosen = settings or FollowSettings(folder, follow or bool(servers), list(servers), key_dir)
    own = OwnFolder("serve") if workdir is None else None
    place = own.path if own is not None else Path(workdir or "")
    write_settings(place, chosen)
    try:
        model = MappedModel(place, chosen.follow)
    except BaseException:
        if own is not None:
            own.close()
        raise
    if own is not None:
        model.own(own)
    return model
