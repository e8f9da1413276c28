"""Servers with tables under policies, in this process and without a pause: what was asked for is done when a request
returns. And what they hold, to be compared with an oracle or with each other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from support.policy_oracle import owner_of

from torchfleet.ps.checkpoint.manifest import Manifest
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.saves.table_loading import load_model
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience
from torchfleet.ps.worker.lookup.dense_group import DenseGroup
from torchfleet.ps.worker.lookup.plan import Plan, SparseGroup
from torchfleet.ps.worker.model_saving import Kind, save_model

MAX_TABLE_BYTES = 1 << 24
SECONDS = 60.0

Contents = dict[int, dict[str, Any]]  # by key


class Direct:
    """A channel that lets the server end its long work before it goes on, or (`patient`) a slice at a time."""

    def __init__(self, server: Server, patient: bool = True) -> None:
        self.server, self.patient = server, patient
        self._replies: deque[Sequence[Frame]] = deque()

    def send(self, frames: Sequence[Frame]) -> bool:
        self._take(self.server.tick(self.now()))  # as a server does when it has nothing else to do
        self._take(self.server.handle(self, frames, None))
        while self.patient and self.work():
            pass
        return True

    def work(self) -> bool:
        """One slice of long work; whether there was any."""
        worked = self.server.work()
        if worked is False:
            time.sleep(0.0005)  # the disk
        self._take(self.server.tick(self.now()))
        return worked is not None

    def receive(self, timeout: float) -> Sequence[Frame] | None:
        if not self._replies and timeout > 0:
            self.work()
        return self._replies.popleft() if self._replies else None

    def reconnect(self) -> None:
        self._replies.clear()

    close = reconnect

    def now(self) -> float:
        return time.monotonic()

    @staticmethod
    def _take(ready: Sequence[tuple[Any, Sequence[Frame]]]) -> None:
        for peer, frames in ready:
            peer._replies.append(frames)


class Tables:
    """These tables on a number of servers, from a saved model if a folder is given; and their client."""

    def __init__(
        self, specs: Sequence[TableSpec], num_servers: int, folder: str | None = None, num_workers: int = 0
    ) -> None:
        self.specs, self.num_servers = list(specs), num_servers
        self.servers = [Server(MAX_TABLE_BYTES, num_workers) for _ in range(num_servers)]
        for index, server in enumerate(self.servers):
            for spec in specs:
                server.state.add_table(spec.for_shard(index, num_servers))
            if folder is not None:
                load_model(server.state, folder, None)
        self.channels = [Direct(server) for server in self.servers]
        self.client = self.connect()

    def connect(self, worker: int = 0) -> Client:
        client = Client([Direct(server) for server in self.servers], patience=Patience(SECONDS, 0), worker=worker)
        for spec in self.specs:
            client.attach(spec)
        return client

    @property
    def plan(self) -> Plan:
        plan = Plan()
        for spec in self.specs:
            if spec.kind == "dense":
                plan.dense.append(DenseGroup(spec, [spec.name], [torch.zeros(spec.size)], {}))
            else:
                plan.sparse[spec.name] = SparseGroup(spec, [], {})
        return plan

    def save(self, folder: str, kind: Kind = "full", extra: Mapping[str, Any] | None = None) -> Manifest:
        """As worker 0 does."""
        return save_model(self.client, self.plan, folder, SECONDS, kind, extra)

    def table(self, name: str, server: int) -> Any:
        return next(t for t in self.servers[server].state.tables.values() if t.spec.name == name)

    def rows(self, name: str) -> Contents:
        """Values and state, and the statistics that the table keeps."""
        found: Contents = {}
        for index in range(self.num_servers):
            for keys, rows, columns in self.table(name, index).chunks():
                self._add(found, keys, {"value": rows, **columns}, name, index)
        return found

    def candidates(self, name: str) -> Contents:
        """Keys that are counted and have no row."""
        found: Contents = {}
        for index in range(self.num_servers):
            admission = self.table(name, index).admission
            if admission is not None and admission.candidates is not None:
                for keys, columns in admission.candidates.chunks(1 << 16, only_changed=False):
                    self._add(found, keys, columns, name, index)
        return found

    def sketch(self, name: str) -> bytes:
        """All blocks of the window's counters, in their order."""
        parts = [self.table(name, index).admission for index in range(self.num_servers)]
        sketches = [part.sketch for part in parts if part is not None and part.sketch is not None]
        return b"".join(sketch.blocks(sketch.first, sketch.first + sketch.num).tobytes() for sketch in sketches)

    def everything(self, without: Sequence[str] = ()) -> dict[str, Any]:
        """All that a save must bring back: per table its step and contents. `without`: names of statistics."""
        found: dict[str, Any] = {}
        for spec in self.specs:
            parts = [self.table(spec.name, index) for index in range(self.num_servers)]
            found[f"{spec.name} step"] = {part.step for part in parts}
            if spec.kind == "dense":
                found[spec.name] = np.concatenate([part.block() for part in parts], axis=1).tobytes()
                continue
            rows = self.rows(spec.name).items()
            found[spec.name] = {key: {n: v for n, v in row.items() if n not in without} for key, row in rows}
            found[f"{spec.name} candidates"] = self.candidates(spec.name)
            found[f"{spec.name} sketch"] = self.sketch(spec.name)
        return found

    def _add(self, found: Contents, keys: np.ndarray, columns: Mapping[str, np.ndarray], name: str, index: int) -> None:
        is_array = self.table(name, index).spec.kind == "array"
        for i, key in enumerate(keys.tolist()):
            assert (key % self.num_servers if is_array else owner_of(key, self.num_servers)) == index
            assert key not in found, f"{key} is on two servers, or twice on one"
            found[key] = {column: values[i].tolist() for column, values in columns.items()}
