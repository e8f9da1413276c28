"""The record of a run as server-sent events. It is read once for all clients, and only while a client is connected."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchfleet.observe.dashboard.job_record import JobRecord
from torchfleet.observe.dashboard.log_pieces import is_log_name
from torchfleet.observe.watch.history import HistoryReader

PERIOD = 1.0  # seconds between two looks at the record
_MANY = 50  # with more processes than this, the period grows in proportion
_MOST_KEPT = 4 << 20  # bytes of deltas that are kept for clients that come back


class Feed:
    """The messages of one run. Clients ask by the id of their last message; messages are encoded once for all."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        names = [folder.resolve().name if len(folders) > 1 else "" for folder in folders]
        self._readers = [(name, HistoryReader(folder)) for name, folder in zip(names, folders, strict=True)]
        self._record = JobRecord()
        self._lock = threading.Lock()
        self._id = secrets.token_hex(4)  # another process that serves the same run counts differently
        self._number = 0  # of the last message
        self._read_at = -PERIOD
        self._deltas: deque[tuple[int, bytes]] = deque()
        self._snapshot: tuple[int, bytes] = (-1, b"")

    def messages(self, last: str = "", now: bool = False) -> tuple[bytes, str]:
        """Return the messages after `last`, and the id of the newest one. `now`: read the record in any case.

        A client without a last message, or with an unknown one, gets a snapshot.
        """
        with self._lock:
            if now or time.monotonic() - self._read_at >= PERIOD * max(1.0, self._record.num_roles / _MANY):
                self._read()
            identity, _, number = last.partition("-")
            has = int(number) if identity == self._id and re.fullmatch("[0-9]{1,18}", number) else -1
            name = f"{self._id}-{self._number}"
            if has == self._number:
                return b"", name
            kept = [message for index, message in self._deltas if index > has]
            if has < 0 or len(kept) != self._number - has:
                return self._whole(), name
            return b"".join(kept), name

    def log_of(self, key: str) -> tuple[Path, str] | None:
        """Folder and name of the log of a process that the record names."""
        with self._lock:
            if not self._number:
                self._read()
            name = self._record.logs.get(key, "")
        if not is_log_name(name):
            return None
        return next(((folder, name) for folder in self.folders if (folder / name).is_file()), (self.folders[0], name))

    def _read(self) -> None:
        self._read_at = time.monotonic()
        num = 0
        for source, reader in self._readers:
            with contextlib.suppress(OSError):  # the folder is gone: keep what was read
                for record in reader.records():
                    self._record.take(record, source)
                    num += 1
        if num == 0 and self._number:
            return
        self._number += 1
        delta = self._record.delta()
        if delta is None:
            self._deltas.clear()
            return
        self._deltas.append((self._number, self._message("delta", delta)))
        while sum(len(message) for _, message in self._deltas) > _MOST_KEPT:
            self._deltas.popleft()

    def _whole(self) -> bytes:
        if self._snapshot[0] != self._number:
            self._snapshot = self._number, self._message("snapshot", self._record.snapshot())
        return self._snapshot[1]

    def _message(self, kind: str, body: dict[str, Any]) -> bytes:
        body = {**body, "now": round(time.time(), 3)}
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (
            self._id.encode(), self._number, kind.encode(), _encoded(body),
        )  # fmt: skip


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # a file name that is not UTF-8, such as the script's: use escapes
        return json.dumps(body).encode()


class Feeds:
    """A cache of the runs that clients watch. The least recently used run is dropped and read again when needed."""

    def __init__(self, most: int = 8) -> None:
        self._feeds: dict[str, Feed] = {}
        self._most, self._lock = most, threading.Lock()

    def of(self, name: str, folders: Sequence[Path]) -> Feed:
        with self._lock:
            feed = self._feeds.pop(name, None) or Feed(folders)
            self._feeds[name] = feed
            while len(self._feeds) > self._most:
                self._feeds.pop(next(iter(self._feeds)))
            return feed
