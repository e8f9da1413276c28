"""Chains of saves written by hand, beside a plain dict of what they must hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint import part_file
from torchfleet.ps.checkpoint.chain import live_candidates, live_rows
from torchfleet.ps.checkpoint.manifest import (
    Manifest,
    Parameter,
    Part,
    described,
    folder_of,
    next_save,
    read_manifest,
    write_manifest,
)
from torchfleet.ps.tables.settings.owners import owners_of
from torchfleet.ps.tables.settings.policy import CountFilterEntry as Count
from torchfleet.ps.tables.settings.policy import ShowClickEntry as Shows
from torchfleet.ps.tables.settings.policy import Shrink, combined
from torchfleet.ps.tables.settings.spec import Rule, TableSpec, shard_range

ADAM = Rule("adam", lr=0.125)
ITEMS = TableSpec(
    "items/ä",
    dim=2,
    rule=ADAM,
    entry=combined([Count(3), Shows("show", "click", 0.5)]),
    shrink=Shrink(delete_after_unseen_days=3, ttl_days=9, max_rows=10**6, where="slot == 3"),
)
PLAIN = TableSpec("plain", dim=1, rule=Rule("sgd"))
IDS = TableSpec("ids", "array", dim=1, size=100, rule=Rule("sgd"))
DENSE = TableSpec("dense.0", "dense", size=7, rule=ADAM)
SPECS = (ITEMS, PLAIN, IDS, DENSE)
STATISTICS = {ITEMS.name: ("seen", "born", "tick", "show", "click", "slot")}
COUNTED = {ITEMS.name: ("count", "seen", "born", "show", "click", "slot")}
FLOATS = ("show", "click")

Contents = dict[int, dict[str, bytes]]  # by key: the row's bytes, and those of each statistic


def column(name: str, number: int) -> Any:
    return np.array([number], np.float32 if name in FLOATS else np.uint32)


def row(spec: TableSpec, number: int) -> dict[str, Any]:
    """A row whose every part tells `number`."""
    width = spec.num_words
    values = (np.arange(width) / 8 + number).astype(np.float32)
    return {"rows": values, **{name: column(name, number)[0] for name in STATISTICS.get(spec.name, ())}}


def candidate(spec: TableSpec, number: int) -> dict[str, Any]:
    return {name: column(name, number)[0] for name in COUNTED[spec.name]}


class Chain:
    """A model in a folder, save by save; `rows` and `candidates` are what it must hold after the last one."""

    def __init__(self, dirname: str, specs: Iterable[TableSpec] = SPECS, rows_per_file: int = 3) -> None:
        self.storage, self.specs, self._rows_per_file = Storage(dirname), tuple(specs), rows_per_file
        self.rows: dict[str, Contents] = {spec.name: {} for spec in self.specs if spec.kind != "dense"}
        self.candidates: dict[str, Contents] = {name: {} for name in self.rows if name in COUNTED}
        self.dense: dict[str, np.ndarray] = {}
        self.sketch = np.zeros((0, 64), np.uint8)
        self.manifest: Manifest | None = None

    def save(
        self,
        num_servers: int,
        rows: Mapping[str, list[tuple[int, int]]],
        gone: Mapping[str, list[int]] | None = None,
        candidates: Mapping[str, list[tuple[int, int]]] | None = None,
        candidates_gone: Mapping[str, list[int]] | None = None,
        full: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> Manifest:
        """One more link: (key, number) of rows in the order in which they are written, of a key twice the later."""
        number = next_save(self.storage)
        self._folder, self._parts, self._num_servers = folder_of(number), [], num_servers
        before = None if full else self.manifest
        if before is None:
            self.rows, self.candidates = {name: {} for name in self.rows}, {name: {} for name in self.candidates}
        for spec in self.specs:
            if spec.kind == "dense":
                self._write_dense(spec, number)
                continue
            self._drop(spec, "gone", self.rows[spec.name], (gone or {}).get(spec.name, []))
            self._put(spec, "rows", self.rows[spec.name], rows.get(spec.name, []))
            if spec.name in self.candidates:
                kept = self.candidates[spec.name]
                self._drop(spec, "candidates_gone", kept, (candidates_gone or {}).get(spec.name, []))
                self._put(spec, "candidates", kept, (candidates or {}).get(spec.name, []))
        tables = [self._described(spec, number) for spec in self.specs]
        self.manifest = Manifest(
            self._folder, number, "full", num_servers, tables, self._parts, token=1000 + number,
            parent=before.number if before else 0, base=before.links() if before else [],
            time=86_400.0 * number, extra=extra or {"pass": number}, num_files=len(self._parts),
        )  # fmt: skip
        write_manifest(self.storage, self.manifest)
        return self.manifest

    def _described(self, spec: TableSpec, number: int) -> Any:
        layout = [Parameter("w", [2, 2], 0), Parameter("b", [3], 4)] if spec.kind == "dense" else []
        num = spec.size if spec.kind == "dense" else len(self.rows[spec.name])
        found = described(spec, True, number, num, layout)
        policies = {name: msgspec.to_builtins(getattr(spec, name)) for name in ("entry", "shrink")}
        return msgspec.structs.replace(found, **policies)

    def _drop(self, spec: TableSpec, kind: Any, kept: Contents, keys: list[int]) -> None:
        for key in keys:
            kept.pop(key, None)
        self._split(spec, kind, [(key, {}) for key in keys])

    def _put(self, spec: TableSpec, kind: Any, kept: Contents, lines: list[tuple[int, int]]) -> None:
        make = row if kind == "rows" else candidate
        made = [(key, make(spec, number)) for key, number in lines]
        kept.update({key: {name: value.tobytes() for name, value in content.items()} for key, content in made})
        self._split(spec, kind, made)

    def _split(self, spec: TableSpec, kind: Any, lines: list[tuple[int, dict[str, Any]]]) -> None:
        """Files of a few rows per server; at least one if they are rows, as servers do it."""
        owners = owners_of(spec, np.array([key for key, _ in lines], np.uint64), self._num_servers)
        for server in range(self._num_servers):
            own = [line for line, owner in zip(lines, owners.tolist(), strict=True) if owner == server]
            if not own and kind == "rows":
                self._write(spec.name, kind, server, 0, self._arrays(spec, []))
            for start in range(0, len(own), self._rows_per_file):
                self._write(
                    spec.name, kind, server, start, self._arrays(spec, own[start : start + self._rows_per_file])
                )

    @staticmethod
    def _arrays(spec: TableSpec, lines: list[tuple[int, dict[str, Any]]]) -> part_file.Arrays:
        keys = np.array([key for key, _ in lines], np.uint64)
        template = lines[0][1] if lines else row(spec, 0)
        return {
            "keys": keys,
            **{
                name: np.array([content[name] for _, content in lines], value.dtype).reshape(len(lines), *value.shape)
                for name, value in template.items()
            },
        }

    def _write_dense(self, spec: TableSpec, number: int) -> None:
        block = np.arange(3 * spec.size, dtype=np.float32).reshape(3, spec.size) + number
        self.dense[spec.name] = block
        for server in range(self._num_servers):
            start, stop = shard_range(spec.size, server, self._num_servers)
            self._write(spec.name, "rows", server, 0, {"values": block[:, start:stop]}, start)

    def write_sketch(self, spec: TableSpec, blocks: np.ndarray) -> None:
        """Behind a save: what is whole in every one."""
        assert self.manifest is not None
        self._parts, self._folder, num = list(self.manifest.parts), self.manifest.save, self.manifest.num_servers
        for server in range(num):
            start, stop = shard_range(len(blocks), server, num)
            self._write(spec.name, "sketch", server, 0, {"blocks": blocks[start:stop]}, start)
        self.manifest = msgspec.structs.replace(self.manifest, parts=self._parts, num_files=len(self._parts))
        write_manifest(self.storage, self.manifest)

    def _write(self, table: str, kind: Any, server: int, number: int, arrays: part_file.Arrays, start: int = 0) -> None:
        file = f"{table.replace('/', '_')}.{kind}.{server}-{number:05}.safetensors"
        buffers = part_file.encode(arrays)
        self.storage.write(f"{self._folder}/{file}", buffers)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        num = len(arrays["keys"]) if "keys" in arrays else len(next(iter(arrays.values())))
        num = arrays["values"].shape[1] if "values" in arrays else num
        self._parts.append(Part(table, file, server, num, size, part_file.checksum(buffers), start, kind))


def held(live: Iterable[tuple[np.ndarray, part_file.Arrays]]) -> Contents:
    """What comes out of a chain. A key that comes twice is an error."""
    found: Contents = {}
    for keys, arrays in live:
        for i, key in enumerate(keys.tolist()):
            assert key not in found, f"{key} comes twice"
            found[key] = {name: array[i].tobytes() for name, array in arrays.items()}
    return found


def assert_holds(dirname: str, chain: Chain, candidates: bool = True) -> None:
    """The model there has exactly the rows, candidates and dense values of the oracle."""
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    for name, expected in chain.rows.items():
        assert held(live_rows(storage, manifest, name)) == expected
    for name, expected in chain.candidates.items() if candidates else ():
        assert held(live_candidates(storage, manifest, name)) == expected
