"""What a folder may look like after a crash, for every step of a program that writes to it.

While `CrashPoints` records, every call of the system that changes a file or a name in the folder is a step. After each
step a kill leaves what is there. A loss of power leaves less: of the data of a file what was synced, perhaps more; of
the names those at the last sync of the folder, with any of the steps since; a rename is one step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

_MAX_PENDING = 5  # changes of names of which every subset is tried
Image = dict[str, bytes]


@dataclass
class Crash:
    """One folder that a crash may leave, and `note()` at that time."""

    image: Image
    step: str
    is_kill: bool
    note: Any

    def put(self, folder: Path) -> None:
        """Make the folder."""
        folder.mkdir()
        for name, data in self.image.items():
            (folder / name).write_bytes(data)


class CrashPoints:
    """Records the crashes of one folder. `note`: returns what is known to the program's clients at a step."""

    def __init__(self, folder: Path, note: Callable[[], Any], has_power_cuts: bool = True) -> None:
        self._folder, self._note, self._has_power_cuts = folder, note, has_power_cuts
        self._synced: dict[int, bytes] = {}  # by inode
        self._names: dict[str, int] = {}  # at the last sync of the folder
        self._pending: list[dict[str, int | None]] = []  # by step: names, and the inodes that they have from then on
        self._lock = threading.RLock()
        self._seen: set[Any] = set()
        self.crashes: list[Crash] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, path_of in _CALLS.items():
                call = getattr(os, name)
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, call, path_of)))
            yield

    def _wrapped(self, name: str, call: Any, path_of: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if name == "open" and not arguments[1] & (os.O_CREAT | os.O_TRUNC):
                return call(*arguments, **named)
            path = path_of(arguments)
            if self._folder not in (path, path.parent):
                return call(*arguments, **named)
            with self._lock:
                done = call(*arguments, **named)
                self._follow(name, path, arguments)
                self._crash(f"{name} {path.name}")
                return done

        return wrapped

    def _follow(self, name: str, path: Path, arguments: Any) -> None:
        if name in ("fsync", "fdatasync"):
            if path == self._folder:
                self._names, self._pending = self._present(), []
            else:
                self._synced[os.fstat(arguments[0]).st_ino] = path.read_bytes()
            return
        known, present = _all_of(self._names, self._pending), self._present()
        changed = {entry for entry in known.keys() | present.keys() if known.get(entry) != present.get(entry)}
        if changed:
            self._pending.append({entry: present.get(entry) for entry in changed})

    def _present(self) -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(self._folder) if entry.name != "lock"}

    def _crash(self, step: str) -> None:
        data = {inode: (self._folder / name).read_bytes() for name, inode in self._present().items()}
        self._add({name: data[inode] for name, inode in self._present().items()}, step, True)
        if not self._has_power_cuts:
            return
        pending = self._pending[-_MAX_PENDING:]
        earlier = _all_of(self._names, self._pending[:-_MAX_PENDING])
        for chosen in itertools.product((False, True), repeat=len(pending)):
            names = _all_of(earlier, itertools.compress(pending, chosen))
            for has_data in (False, True):
                held = self._synced | data if has_data else self._synced
                self._add({name: held.get(inode, b"") for name, inode in names.items() if inode}, step, False)

    def _add(self, image: Image, step: str, is_kill: bool) -> None:
        note = self._note()
        found = (is_kill, repr(note), *sorted(image.items()))
        if found not in self._seen:
            self._seen.add(found)
            self.crashes.append(Crash(image, step, is_kill, note))


def _all_of(names: Mapping[str, int | None], steps: Iterable[Mapping[str, int | None]]) -> dict[str, int | None]:
    found = dict(names)
    for step in steps:
        found.update(step)
    return found


def _of_file(arguments: Any) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))


def _of_path(arguments: Any) -> Path:
    return Path(arguments[0])


_CALLS: dict[str, Callable[[Any], Path]] = {
    **dict.fromkeys(("open", "unlink", "rename"), _of_path),
    **dict.fromkeys(("pwritev", "write", "ftruncate", "fsync", "fdatasync"), _of_file),
}
