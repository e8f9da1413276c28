"""The donefile: one line of JSON per save of the chain, for programs that wait for new ones."""

from __future__ import annotations

import msgspec

from torchfleet.checkpoint.manifest import Manifest
from torchfleet.storage import Storage

DONEFILE = "donefile.jsonl"


def write_donefile(storage: Storage, manifest: Manifest) -> None:
    """The very last act of saving, after the manifest: all links of the chain, the oldest first. Replaces the file."""
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
