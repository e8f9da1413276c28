"""A store, `cut://`, whose files are seen from their first byte on; it can end in the middle of any operation."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class Dead(OSError):
    """Nothing is done any more by a process that was killed."""


class Operations:
    """Counted; number `last` is half done, and all after it fail."""

    def __init__(self, last: int = 1 << 30) -> None:
        self.last, self.done = last, list[str]()
        self._num, self._lock = 0, threading.Lock()

    def step(self, what: str) -> bool:
        """Whether this operation is the one that is half done."""
        with self._lock:
            self._num += 1
            if self._num > self.last:
                raise Dead(what)
            self.done.append(what)
            return self._num == self.last


class CutStore(MemoryFileSystem):
    protocol = "cut"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    operations = Operations()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("cut://")))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if self.operations.step(f"makedirs {path}"):
            raise Dead(path)
        super().makedirs(path, exist_ok)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "wb":
            return super()._open(path, mode, **options)
        is_last = self.operations.step(f"open {path}")
        made = CutFile(self, path)
        made.commit()  # an empty file is in the place of what was there
        if is_last:
            raise Dead(path)
        return made

    def rm_file(self, path: str) -> None:
        is_last = self.operations.step(f"rm_file {path}")
        super().rm_file(path)
        if is_last:
            raise Dead(path)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """A rename, which replaces nothing."""
        assert path2 not in self.store, f"{path2} is there"
        is_last = self.operations.step(f"mv {path2}")
        self.store[path2] = self.store.pop(path1)
        if is_last:
            raise Dead(path2)


class CutFile(MemoryFile):
    def write(self, data: Any) -> int:
        if CutStore.operations.step(f"write {self.path}"):
            super().write(bytes(data)[: len(data) // 2])
            raise Dead(self.path)
        return super().write(data)


fsspec.register_implementation("cut", CutStore, clobber=True)
