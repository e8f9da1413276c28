"""Saving a model from worker 0: every server writes its tables, then the manifest commits the save."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import Reservation, alone, check_written, reserve
from torchfleet.ps.checkpoint.manifest import (
    Manifest,
    Part,
    Saved,
    Table,
    as_json,
    described,
    next_save,
    present_model,
    read_manifest,
    remove_others,
    write_donefile,
    write_manifest,
)
from torchfleet.ps.checkpoint.manifest_check import check_manifest
from torchfleet.ps.checkpoint.manifest_file import FILE, has_manifest, read_body
from torchfleet.ps.checkpoint.save_files import SERVING, GivenFiles, SaveFiles, copy_beside_manifest, undescribed
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.lookup.dense_group import BytesGroup
from torchfleet.ps.worker.lookup.plan import Plan

Kind = Literal["full", "delta", "inference"]
_NOT_DESCRIBED = (
    "its job had no description of it. Worker 0 of a job with parameter servers has one once it has called the model, "
    "or if it continues, by fleet.init_worker(dirname), a save that has one, with the same tables and parameters. Save "
    "the model again after a step of worker 0"
)


class TablesBeside(Protocol):
    """Tables of a model that are not on servers, but are part of its saves."""

    def write(self, storage: Storage, folder: str, kind: Kind, token: int, parent: int) -> list[Part]:
        """Write their part files, as files of server 0. `token`: of this save; `parent`: the previous save's token."""

    def described(self, with_state: bool) -> list[Table]:
        """Their entries in the manifest; after `write`, with the rows that it wrote."""


def save_model(
    client: Client,
    plan: Plan,
    dirname: str,
    timeout: float,
    kind: Kind = "full",
    extra: Mapping[str, Any] | None = None,
    beside: TablesBeside | None = None,
    features: Sequence[dict[str, Any]] = (),
    described: bytes | None = None,
    files: Sequence[SaveFiles] = (),
) -> Manifest:
    """Returns when the whole model is on disk. An error leaves the previous model in place.

    `beside`: tables that are not on the servers. `features`: of the model, as ModelFeatures.saved returns them.
    `described`: the save's serving.json; None: it cannot be served. `files`: more files of the save.
    """
    serving = GivenFiles({SERVING: undescribed(_NOT_DESCRIBED) if described is None else described})
    storage = Storage(dirname)
    kept = as_json(extra or {}, "save_persistables")
    before = read_manifest(storage) if kind == "delta" and has_manifest(storage) else present_model(storage)
    if kind == "delta":
        _check_base(storage, before, plan, [] if beside is None else beside.described(True))
    for group in plan.fixed:
        client.set_dense(group.spec.name, group.values())  # buffers live on workers: worker 0's are saved
    token, with_state = secrets.randbits(62) + 1, kind != "inference"
    parent = before.token if before is not None and before.kind == "full" else 0
    with reserve(storage, next_save(storage, 0 if before is None else before.number), token) as held:
        is_delta = kind == "delta"
        saved = client.save(storage.path, held.folder, with_state, timeout, token=token, parent=parent, delta=is_delta)
        parts = [part for server in saved for part in server.parts]
        tables = _tables(plan, saved, with_state)
        if beside is not None:
            parts += beside.write(storage, held.folder, kind, token, parent)
            tables += beside.described(with_state)
        sizes: dict[str, int] = {}
        for own in (serving, *files):
            sizes |= own.write(storage, held.folder, token)
        manifest = Manifest(
            held.folder,
            held.number,
            "full" if with_state else "inference",
            client.num_servers,
            tables,
            parts,
            token=token,
            time=max(server.time for server in saved),
            is_time_set=any(server.is_time_set for server in saved),
            extra=kept,
            num_files=len(parts),
            features=list(features),
        )
        return _commit(storage, manifest, before if is_delta else None, held, sizes, described)


def tell_of_replacing(storage: Storage, kind: Kind, known: Collection[str]) -> int | None:
    """Report on stderr that a save replaces a resumable model that this job has neither loaded nor saved. Returns the
    number of the save that is replaced; None if none is.

    `known`: the folders that the job has loaded or saved. The usual cause: the script loads the model on servers only.
    """
    before = present_model(storage) if kind != "delta" and storage.path not in known else None
    if before is None or before.kind != "full":
        return None
    print(
        f"{storage.path} holds save {before.number}, and this job did not start from it: the new save replaces it. To "
        "go on from a saved model, give its folder to fleet.init_server(dirname) and fleet.init_worker(dirname).",
        file=sys.stderr,
        flush=True,
    )
    return before.number


def _commit(
    storage: Storage,
    manifest: Manifest,
    before: Manifest | None,
    held: Reservation,
    sizes: Mapping[str, int],
    described: bytes | None,
) -> Manifest:
    """Commit the save; `before` is the save that a delta continues, which may have been compacted since it was read.
    `sizes`: of its files beside the parts. `described`: its serving.json, if it can be served.

    The replaced model is removed last, after the new model's files were checked and its manifest was read back.
    """
    with alone(storage):
        check_written(storage, manifest.save, {part.file: part.bytes for part in manifest.parts} | dict(sizes))
        if before is not None:
            now = read_manifest(storage)
            if now.token != before.token:
                raise CheckpointError(
                    f"another save was made in {storage.path} while this delta was written; it stands, and this one is "
                    "dropped. Does another job save to the same folder?"
                )
            manifest = msgspec.structs.replace(manifest, parent=now.number, base=now.links())
        # the check of a load: a manifest that a load would refuse replaces nothing
        check_manifest(manifest, storage.place(FILE))
        if write_manifest(storage, manifest) != read_body(storage):
            raise CheckpointError(f"the manifest in {storage.path} is not the one that was written: nothing is removed")
        held.release()
        copy_beside_manifest(storage, described)
        write_donefile(storage, manifest)
        if before is None:
            remove_others(storage, manifest)
    return manifest


def _check_base(storage: Storage, before: Manifest | None, plan: Plan, beside: Sequence[Table]) -> None:
    """Raise CheckpointError unless the delta continues a full save of the same tables."""
    if before is None or before.kind != "full":
        found = "nothing" if before is None else f"a save for prediction ({before.save})"
        raise CheckpointError(f"a delta needs a full save in {storage.path}, and there is {found}: use mode=0")
    known = {table.name: _shape(table) for table in before.tables}
    now = {table.name: _shape(table) for table in (*_tables(plan, [], True), *beside)}
    for name in sorted((set(known) | set(now)) - _new_bytes(before, plan)):
        if known.get(name) != now.get(name):
            raise CheckpointError(
                f"table '{name}' is not what it was at the save in {storage.path} ({known.get(name)}, and now "
                f"{now.get(name)}): a delta cannot continue it. Make a full save (mode=0)."
            )


def _new_bytes(before: Manifest, plan: Plan) -> set[str]:
    """The table of tensors that are not float32, if a release without this table began the chain. Every save holds the
    whole table.
    """
    return {group.spec.name for group in plan.fixed if isinstance(group, BytesGroup)} - {t.name for t in before.tables}


def _shape(table: Table) -> tuple[Any, ...]:
    """The properties of a table that must be the same in a save and its deltas."""
    state = table.num_states, table.num_row_states, table.state_names
    values = table.format.get("dtype", "float32"), table.format.get("step", "row")
    return table.kind, table.dim, table.size, table.rule["name"], state, table.entry, table.shrink, *values


def _tables(plan: Plan, saved: list[Saved], with_state: bool) -> list[Table]:
    tables, layouts = [], plan.layouts
    for spec in plan.specs:
        step, rows = 0, 0
        for server in saved:
            step, rows = max(step, server.steps[spec.name]), rows + server.rows[spec.name]
        tables.append(described(spec, with_state, step, rows, layouts.get(spec.name, [])))
    return tables
