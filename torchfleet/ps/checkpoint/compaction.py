"""Turns a chain of saves into one full save, which loads bit-identically."""

from __future__ import annotations

import os
import re

import msgspec
import numpy as np

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint import part_file
from torchfleet.ps.checkpoint.chain import live_candidates, saved_rows
from torchfleet.ps.checkpoint.lock import alone
from torchfleet.ps.checkpoint.manifest import (
    VERSION,
    Link,
    Manifest,
    Table,
    next_save,
    read_manifest,
    remove_others,
    write_donefile,
    write_manifest,
)
from torchfleet.ps.checkpoint.part_writer import Files, Show, write_file
from torchfleet.ps.checkpoint.save_files import SERVING, copy_beside_manifest, read_model, undescribed

_SAVE = re.compile("save-[0-9]{1,18}")
_COMPACTED = re.compile("save-[0-9]{12}")
_NOT_DESCRIBED = "the saves that were compacted had no serving.json"


def compact(dirname: str, output: str | None = None, show: Show = lambda text: None) -> Manifest:
    """Replace a chain by one full save, or write the full save into the folder `output`; returns its manifest.

    Number, token, time and extra are those of the chain's newest save, so that a job can continue it with deltas. A
    process that is killed at any moment leaves either the chain or the full save. Deltas saved meanwhile are kept, and
    continue the full save; if another full save was made meanwhile, it is kept and this raises CheckpointError. `show`
    receives the progress.

    Memory: one file per server, a few more in flight, and the keys of a table (`saved_rows`).
    """
    source = Storage(dirname)
    target = source if output is None else Storage(output)
    manifest, described = read_model(source)
    in_place = _real(target) == _real(source)
    if in_place and not manifest.base:
        return manifest
    with alone(target):
        folder = f"save-{next_save(target):012}"  # a name that no concurrent save of a job takes
        write_file(
            target, f"{folder}/compacted.json", [msgspec.json.encode([link.number for link in manifest.links()])]
        )
    try:
        made = _made(source, manifest, target, folder, show)
        write_file(target, f"{folder}/{SERVING}", [undescribed(_NOT_DESCRIBED) if described is None else described])
    except BaseException:
        target.remove_folder(folder)
        raise
    with alone(target):
        replaced = _replace(target, made, manifest.links() if in_place else None)
        if not in_place:
            copy_beside_manifest(target, described)
        return replaced


def _real(storage: Storage) -> str:
    return os.path.realpath(storage.path) if storage.is_local else storage.path


def _made(source: Storage, manifest: Manifest, target: Storage, folder: str, show: Show) -> Manifest:
    newest = manifest.links()[-1]
    tables = []
    with Files(target, folder, newest.num_servers, show) as files:
        for table in manifest.tables:
            if table.is_dense:
                files.copy(source, newest, table, "rows")
                tables.append(table)
                continue
            num = files.put(table.spec(), "rows", saved_rows(source, manifest, table.name), _no_rows(table))
            files.put(table.spec(), "candidates", live_candidates(source, manifest, table.name), {})
            files.copy(source, newest, table, "sketch")
            tables.append(msgspec.structs.replace(table, rows=num))
        written = files.written()
    return msgspec.structs.replace(
        manifest, save=folder, parts=written, num_files=len(written), tables=tables, base=[], parent=0, version=VERSION
    )


def _no_rows(table: Table) -> part_file.Arrays:
    return {"rows": np.empty((0, table.num_words), np.float32)}


def _replace(target: Storage, made: Manifest, compacted: list[Link] | None) -> Manifest:
    """Commit the full save as the model, or, if deltas were saved meanwhile, as the start of their chain."""
    now = read_manifest(target) if compacted is not None else made
    later = now.links()[len(compacted or []) :]
    if compacted is not None and now.links()[: len(compacted)] != compacted:
        target.remove_folder(made.save)
        raise CheckpointError(
            f"{target.path} was saved to while it was compacted. The newer model stays as it is; compact it again."
        )
    if not all(target.exists(f"{made.save}/{part.file}") for part in made.parts):
        target.remove_folder(made.save)
        raise CheckpointError(f"{target.place(made.save)} was removed while it was written; the model is as it was")
    if compacted is not None and later:
        made = msgspec.structs.replace(now, base=[*made.links(), *later[:-1]])
    write_manifest(target, made)
    write_donefile(target, made)
    if compacted is None:
        remove_others(target, made)
    else:
        _remove(target, made, {link.save for link in compacted})
    return made


def _remove(target: Storage, made: Manifest, old: set[str]) -> None:
    """Remove the folders of the old chain, and the remains of killed compactions."""
    saves = {name for name in target.folders() if _SAVE.fullmatch(name)} - {link.save for link in made.links()}
    mine = {name for name in saves if _COMPACTED.fullmatch(name)}
    if saves - mine - old:
        return  # a job is saving, perhaps a delta of the old chain: its next save removes what is not needed
    for name in sorted(saves):
        target.remove_folder(name)
