"""Saves of tables on devices in a collective job, in the file format of servers. Any number of ranks or servers can
load them. Rank 0 also writes the network's values there, so that the save is a whole model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from torchfleet.base.errors import CheckpointError, FleetError
from torchfleet.base.prepared_types import prepared
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.planning import error_text
from torchfleet.collective.world import Gathering
from torchfleet.ps.checkpoint.manifest import Manifest, Part, Table, present_model, read_manifest
from torchfleet.ps.checkpoint.part_reader import check_match, load_sparse, read_dense
from torchfleet.ps.gpu.table_saves import TableSaves, described_tables, write_tables
from torchfleet.ps.net.transport import InProcess
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.server import Server
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.lookup.plan import Plan
from torchfleet.ps.worker.model_saving import Kind, save_model

_TIMEOUT = 3600.0  # seconds that writing the network may take


class Order(msgspec.Struct):
    """What rank 0 tells the others to write, or why it cannot save."""

    folder: str = ""
    kind: Kind = "full"
    token: int = 0
    parent: int = 0
    error: str = ""


class Written(msgspec.Struct):
    """What a rank has written, or why it could not."""

    parts: list[Part] = []
    rows: dict[str, int] = {}
    error: str = ""


class RankTables:
    """The tables of all ranks: a TablesBeside of ps/worker/model_saving.py. Ranks other than 0 call `follow`."""

    def __init__(self, tables: Mapping[str, TableSaves], ranks: Gathering) -> None:
        self._tables, self._ranks = tables, ranks
        self._rows: dict[str, int] = {}
        self.is_ordered = False  # the other ranks know what to write

    def write(self, storage: Storage, folder: str, kind: Kind, token: int, parent: int) -> list[Part]:
        return self._write(storage, self._tell(Order(folder, kind, token, parent)))

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that rank 0 cannot save, if they still wait for its order."""
        if not self.is_ordered:
            self._tell(Order(error=error_text(error)))

    def follow(self, storage: Storage) -> int:
        """Write this rank's rows as rank 0 orders. Returns 0: only rank 0 knows the number of the save."""
        order = self._tell(None)
        if order.error:
            raise CheckpointError(f"rank 0: {order.error}")
        self._write(storage, order)
        return 0

    def described(self, with_state: bool) -> list[Table]:
        found = described_tables(self._tables, with_state)
        return [msgspec.structs.replace(table, rows=self._rows.get(table.name, table.rows)) for table in found]

    def _tell(self, order: Order | None) -> Order:
        self.is_ordered = True
        given = self._ranks.gather(b"" if order is None else msgspec.json.encode(order))
        return msgspec.json.decode(given[0], type=prepared(Order))

    def _write(self, storage: Storage, order: Order) -> list[Part]:
        own = Written()
        try:
            for saves in self._tables.values():
                saves.begin(order.token, order.parent, order.kind)
            own.parts = write_tables(storage, order.folder, self._ranks.rank, self._tables, order.kind)
            own.rows = {name: saves.num_rows for name, saves in self._tables.items()}
        except Exception as error:
            own.error = error_text(error)
        found = [
            msgspec.json.decode(data, type=prepared(Written)) for data in self._ranks.gather(msgspec.json.encode(own))
        ]
        failed = [f"rank {rank}: {written.error}" for rank, written in enumerate(found) if written.error]
        if failed:
            raise CheckpointError("; ".join(failed))
        self._rows = {name: sum(written.rows[name] for written in found) for name in self._tables}
        return [part for written in found for part in written.parts]


def save_tables(
    dirname: str,
    plan: Plan,
    tables: Mapping[str, TableSaves],
    ranks: Gathering,
    kind: Kind = "full",
    extra: Mapping[str, Any] | None = None,
    features: Callable[[], list[dict[str, Any]]] = list,
) -> int:
    """Save the tables and the network's values; returns the number of the save. All ranks call it together. An error on
    any rank is raised on all, and leaves the previous save in place. `features`: as for plan_save.
    """
    beside, storage = RankTables(tables, ranks), Storage(dirname)
    if ranks.rank:
        return _agree(ranks, lambda: beside.follow(storage))
    with contextlib.ExitStack() as stack:

        def save() -> int:
            try:
                client = stack.enter_context(_keeper(plan, storage))
                network = dataclasses.replace(plan, sparse={})
                described = features()
                return save_model(client, network, dirname, _TIMEOUT, kind, extra, beside, described).number
            except Exception as error:
                beside.refuse(error)
                raise

        return _agree(ranks, save)


def _agree(ranks: Gathering, save: Callable[[], int]) -> int:
    """Call `save` on every rank; returns rank 0's result. Raises this rank's own error, or else rank 0's."""
    number, failed = 0, None
    try:
        number = save()
    except Exception as error:
        failed = error
    own = number, "" if failed is None else error_text(failed)
    found, text = msgspec.json.decode(ranks.gather(msgspec.json.encode(own))[0], type=tuple[int, str])
    if failed is not None:
        raise failed
    if text:
        raise CheckpointError(f"rank 0: {text}")
    return found


def _keeper(plan: Plan, storage: Storage) -> Client:
    """The client of a server in this process that holds the network's values. Every save writes these values whole."""
    server, before = Server(num_workers=1), present_model(storage)
    server.state.saves.chain.attempt = 0 if before is None else before.token
    client = Client([InProcess(server).connect()], names=["the local server"], role=Role.LAUNCHER)
    for group in (*plan.dense, *plan.fixed):
        client.create_table(group.spec)
        client.set_dense(group.spec.name, group.values())
    return client


def load_together(
    dirname: str, plan: Plan | None, tables: Mapping[str, TableSaves], ranks: Gathering
) -> dict[str, Any]:
    """Load the tables, and with a plan the network's values; returns the `extra` of the save. All ranks call it
    together, and an error on any rank is raised on all.
    """
    failed, extra = None, dict[str, Any]()
    try:
        if plan is not None:
            load_network(dirname, plan)
        extra = dict(load_tables(dirname, tables).extra)
    except Exception as error:
        failed = error
    texts = ranks.gather(b"" if failed is None else error_text(failed).encode())
    if failed is not None:
        raise failed
    for rank, text in enumerate(texts):
        if text:
            raise CheckpointError(f"rank {rank}: {text.decode()}")
    return extra


def load_tables(dirname: str, tables: Mapping[str, TableSaves]) -> Manifest:
    """Replace the rows of this rank by those of a save by ranks or servers, with their state. All tables must be in it:
    this is checked before the first table changes.
    """
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    for saves in tables.values():
        check_match(storage, manifest.table(saves.spec.name), saves.spec)
    for saves in tables.values():
        saves.clear()
        load_sparse(storage, manifest, saves)
        if manifest.kind == "full":
            saves.continue_from(manifest.token)
    return manifest


def load_network(dirname: str, plan: Plan) -> None:
    """Load the values of all parameters and buffers by name from a save of servers. The optimizer starts anew."""
    storage = Storage(dirname)
    manifest = read_manifest(storage)
    known = {parameter.name: (table, parameter) for table in manifest.tables for parameter in table.parameters}
    blocks: dict[str, Any] = {}
    for group in plan.dense:
        values = []
        for own in group.layout():
            if own.name not in known or known[own.name][1].shape != own.shape:
                found = "none" if own.name not in known else f"one of shape {known[own.name][1].shape}"
                raise CheckpointError(
                    f"{dirname}: expected a parameter '{own.name}' of shape {own.shape}, found {found}"
                )
            table, there = known[own.name]
            if table.name not in blocks:
                blocks[table.name] = read_dense(storage, manifest, table)[0]
            values.append(blocks[table.name][there.start : there.start + there.size])
        with torch.no_grad():
            group.write(np.concatenate(values))


def check_alone(degrees: Mapping[str, int]) -> None:
    """Raise FleetError if ranks hold different layers: rows are shared by ranks that train the same model."""
    found = [f"{axis}={degrees[axis]}" for axis in ("pipe", "model") if degrees.get(axis, 1) > 1]
    if found:
        raise FleetError(
            f"tables on devices are shared by ranks with the whole model, found a job with {', '.join(found)}. Leave "
            "out pipeline and tensor parallelism."
        )
