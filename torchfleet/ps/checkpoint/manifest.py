"""The manifest: which tables a saved model has, which files they are in, and a checksum of each file and of itself.

The donefile beside it has one line of JSON per save of the chain, for programs that wait for new saves.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from torchfleet.base.errors import CheckpointError
from torchfleet.base.prepared_types import prepared
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.lock import remove_all_but
from torchfleet.ps.checkpoint.manifest_check import check_manifest
from torchfleet.ps.checkpoint.manifest_file import FILE, read_body, write_body
from torchfleet.ps.checkpoint.manifest_parts import (
    FORMAT,
    VERSION,
    Link,
    Manifest,
    Parameter,
    Part,
    Saved,
    Table,
    described,
)
from torchfleet.ps.checkpoint.repeated_keys import refuse_repeated_names

__all__ = [
    "DONEFILE",
    "FILE",
    "FORMAT",
    "VERSION",
    "Link",
    "Manifest",
    "Parameter",
    "Part",
    "Saved",
    "Table",
    "as_json",
    "described",
    "folder_of",
    "next_save",
    "present_model",
    "read_manifest",
    "remove_others",
    "write_donefile",
    "write_manifest",
]

DONEFILE = "donefile.jsonl"
_SAVE = re.compile(r"save-[0-9]{1,18}")  # other folders are not touched


def write_manifest(storage: Storage, manifest: Manifest) -> bytes:
    """Commit a save: from here on it is the model. Returns what `read_body` will return."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_body(storage, body)
    return body


def read_manifest(storage: Storage) -> Manifest:
    """Read the manifest. Raises CheckpointError if there is no complete model, or if its manifest is damaged."""
    body, place = read_body(storage), storage.place(FILE)
    try:
        manifest = msgspec.json.decode(body, type=prepared(Manifest))
        refuse_repeated_names(body, place)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{place} is not a manifest of this version: {error}") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise CheckpointError(
            f"{place}: expected {FORMAT} version {VERSION}, found {manifest.format} version {manifest.version}"
        )
    check_manifest(manifest, place)
    return manifest


def write_donefile(storage: Storage, manifest: Manifest) -> None:
    """Replace the donefile: all links of the chain, oldest first. The last action of a save, after the manifest."""
    lines = [
        {
            "number": link.number,
            "parent": link.parent,
            "kind": "delta" if link.parent else manifest.kind,
            "folder": link.save,
            "time": link.time,
        }
        for link in manifest.links()
    ]
    storage.write(DONEFILE, [b"".join(msgspec.json.encode(line) + b"\n" for line in lines)])


def present_model(storage: Storage) -> Manifest | None:
    """The model in this folder; None if the folder has no model, or a damaged one, which the next save replaces."""
    with contextlib.suppress(CheckpointError):
        return read_manifest(storage)
    return None


def next_save(storage: Storage, newest: int | None = None) -> int:
    """A number above the numbers of all saves in this folder, complete or not.

    `newest`: the number of the present model, if the caller has read it; 0 if there is no model.
    """
    if newest is None:
        present = present_model(storage)
        newest = 0 if present is None else present.number
    for name in storage.folders():
        if _SAVE.fullmatch(name):
            newest = max(newest, int(name[5:]))
    return newest + 1


def folder_of(number: int) -> str:
    return f"save-{number:06}"


def remove_others(storage: Storage, manifest: Manifest) -> None:
    """Remove folders of saves outside the chain, and of unfinished saves."""
    remove_all_but(storage, {link.save for link in manifest.links()})


def as_json(extra: Mapping[str, Any], function: str) -> dict[str, Any]:
    """`extra` as it will be read back. Raises CheckpointError, which names `function`, for what JSON cannot hold."""
    try:
        kept = msgspec.json.decode(msgspec.json.encode(dict(extra)))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{function}(extra=...): expected a dict that JSON can hold: {error}") from None
    assert isinstance(kept, dict)
    return kept
