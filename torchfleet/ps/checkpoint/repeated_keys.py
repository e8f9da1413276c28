"""Detects keys that repeat in one save although they may not.

A key is in a save once, unless its row was dropped and made again while the save was written. A server notes with every
part how many rows it had dropped since the save began: no more keys than that may repeat.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest_parts import Part
from torchfleet.ps.tables.rows.keymap import Keys


class RepeatedKeys:
    """Collects the keys of one table and kind in one save. Memory: 8 bytes per key."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._parts: list[tuple[Part, Keys]] = []

    def add(self, part: Part, keys: Keys) -> None:
        """Take the keys of a part. Parts of older versions do not say how many keys may repeat, and are not checked."""
        if part.repeats is not None and len(keys):
            self._parts.append((part, keys))

    def check(self) -> None:
        """Raise CheckpointError, which names file and key, if more keys repeat than may. Call it after all parts."""
        keys = np.sort(np.concatenate([np.empty(0, np.uint64), *(keys for _, keys in self._parts)]))
        repeated = keys[1:][keys[1:] == keys[:-1]]
        by_server: dict[int, int] = {}
        for part, _ in self._parts:
            by_server[part.shard] = max(by_server.get(part.shard, 0), part.repeats or 0)
        allowed = sum(by_server.values())
        if len(repeated) > allowed:
            raise CheckpointError(self._described(repeated[0], len(repeated), allowed))

    def _described(self, key: Any, num: int, allowed: int) -> str:
        files = [self._storage.place(f"{self._folder}/{part.file}") for part, keys in self._parts if key in keys]
        where = f"more than once, and in {', '.join(files[1:])}" if files[1:] else "more than once"
        return (
            f"{files[0]}: key {int(key)} of table '{self._parts[0][0].table}' is there {where}. Expected at most "
            f"{allowed:,} keys that repeat in this save, found {num:,}. Load another save of the model."
        )


def refuse_repeated_names(body: bytes, place: str) -> None:
    """Raise CheckpointError if an object of this JSON has a name twice: a reader takes one and ignores the other."""

    def checked(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(
                f"{place}: '{twice:.100}' is there twice in one object. Load another save of the model."
            )

    json.loads(body, object_pairs_hook=checked)
