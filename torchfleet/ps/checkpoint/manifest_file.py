"""The file that commits a save: manifest.json, which is replaced atomically.

On this machine it is replaced by a rename. Other stores may be unable to replace a file atomically. There the manifest
is first written under a new name, manifest-000007.json, and read back; only then is manifest.json replaced. While
manifest.json is replaced, the numbered file is complete; while a numbered file is written, manifest.json is complete.
So if manifest.json is damaged or missing, the file with the highest number is its replacement, and is read instead. If
that file is damaged too, nothing is read: a file with a lower number may be older than a save that was reported as
complete.
"""

from __future__ import annotations

import re
import sys
import zlib

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage

FILE = "manifest.json"
_NUMBERED = re.compile(r"manifest-([0-9]{6,18})\.json")


def write_body(storage: Storage, body: bytes) -> None:
    """Replace the manifest: the last step of a save.

    An error leaves the old manifest; or, on stores that cannot replace a file atomically, the old or the new one.
    """
    older = _numbered(storage)
    _restore(storage, older)
    whole = _encode(body)
    if not storage.is_local:
        number = max(older.values(), default=0) + 1
        _write_and_compare(storage, f"manifest-{number:06}.json", whole)
    for name in older:  # manifest.json is complete now
        storage.remove_file(name)
    storage.write(FILE, [whole])


def read_body(storage: Storage) -> bytes:
    """The JSON of the manifest. Raises CheckpointError if there is no complete model, or if the manifest is damaged."""
    body = _whole(storage, FILE)
    return _replacement(storage) if body is None else body


def has_manifest(storage: Storage) -> bool:
    """Whether a model was saved there. False after a first save that was interrupted before its last step."""
    return storage.exists(FILE) or any(_whole(storage, name) is not None for name in _numbered(storage))


def _replacement(storage: Storage) -> bytes:
    """The replacement of manifest.json, which is damaged or missing."""
    if not has_manifest(storage):
        raise CheckpointError(
            f"no saved model in {storage.path}: there is no {FILE}. Give the "
            "folder that a model was saved to; if that save was interrupted, save again"
        )
    place, numbered = storage.place(FILE), _numbered(storage)
    if not numbered:
        raise CheckpointError(f"{place} is damaged: its checksum does not fit. Load another save of the model.")
    newest = max(numbered, key=numbered.__getitem__)
    body = _whole(storage, newest)
    if body is None:
        raise CheckpointError(
            f"{place} is damaged or missing, and {newest}, which was written before it, is damaged too. Load another "
            "save of the model."
        )
    print(
        f"{place} is damaged or missing, as after a save that ended while it was replaced; {newest}, which was to "
        "replace it, is whole and is read instead",
        file=sys.stderr,
        flush=True,
    )
    return body


def _restore(storage: Storage, numbered: dict[str, int]) -> None:
    """Repair manifest.json before another numbered file is written, which may be interrupted as well."""
    if numbered and _whole(storage, FILE) is None:
        body = _whole(storage, max(numbered, key=numbered.__getitem__))
        if body is not None:  # otherwise no file is complete, and nothing can be lost
            storage.write(FILE, [_encode(body)])


def _write_and_compare(storage: Storage, name: str, data: bytes) -> None:
    storage.write(name, [data])
    if storage.read(name) != data:
        raise CheckpointError(
            f"{storage.place(name)} is not what was written to it; the model that was there before stays. Does another "
            "job save to the same folder?"
        )


def _encode(body: bytes) -> bytes:
    return b'{"checksum": %d, "manifest":\n%s}\n' % (zlib.crc32(body), body)


def _numbered(storage: Storage) -> dict[str, int]:
    found = ((name, _NUMBERED.fullmatch(name)) for name in storage.files())
    return {name: int(match[1]) for name, match in found if match}


def _whole(storage: Storage, name: str) -> bytes | None:
    """The contents of the file; None if it is missing or its checksum does not match. Raises CheckpointError if it is a
    link out of the folder.
    """
    if not storage.exists(name):
        return None
    storage.check_own(name)
    head, _, body = storage.read(name).partition(b"\n")
    body, end = body[:-2], body[-2:]
    is_whole = end == b"}\n" and head == b'{"checksum": %d, "manifest":' % zlib.crc32(body)
    return body if is_whole else None
