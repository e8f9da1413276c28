"""The manifest: which tables a saved model has, which files they are in, and a checksum of each file and of itself."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from torchfleet.checkpoint.manifest_file import FILE, has_manifest, read_body, write_body
from torchfleet.errors import CheckpointError
from torchfleet.storage import Storage
from torchfleet.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.tables.settings.spec import Initializer, Rule, TableSpec, kind_named
from torchfleet.tables.table import PartKind

FORMAT = "torchfleet checkpoint"
VERSION = 2
READABLE = (1, 2)
_SAVE = re.compile(r"save-[0-9]{1,18}")  # other folders are not ours
_INFINITE = (math.inf, -math.inf)


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True):
    """A dense parameter or buffer: where in its table's block it lies."""

    name: str
    shape: list[int]
    start: int
    dtype: str = "float32"  # another one is kept as its bytes: byte_words.py
    words: int = 0  # how many elements of the block these are

    @property
    def size(self) -> int:
        """How many elements of the block it takes."""
        return self.words if self.dtype != "float32" else math.prod(self.shape)

    @property
    def described(self) -> str:
        return f"{self.dtype} of shape {tuple(self.shape)}"


class Part(msgspec.Struct, frozen=True):
    """One file: rows of a sparse table, or a stretch of a dense one, or what belongs to rows (docs/checkpoints.md)."""

    table: str
    file: str
    shard: int = msgspec.field(name="part")  # of the table, counted over the servers of the save
    rows: int
    bytes: int
    crc32: int
    start: int = 0  # dense: first element; sketch: first block
    kind: PartKind = "rows"


class Link(msgspec.Struct, frozen=True):
    """One save of a chain: a full one, or what changed since its parent."""

    save: str  # the folder with the parts
    number: int
    parent: int  # 0: a full save
    num_servers: int
    parts: list[Part]
    time: float = 0.0  # by the clock of the tables

    def parts_of(self, table: str, kind: PartKind = "rows") -> list[Part]:
        return [part for part in self.parts if part.table == table and part.kind == kind]


class Saved(msgspec.Struct):
    """What one server has saved."""

    parts: list[Part]
    steps: dict[str, int]
    rows: dict[str, int]  # that the table has, whether they are in this save or not
    time: float  # by the clock of the tables
    is_time_set: bool = False  # by the job; else it is the wall clock's


class Table(msgspec.Struct, frozen=True):
    """A saved table: its description, and how far it had come."""

    name: str
    kind: str
    dim: int
    size: int
    seed: int
    rule: dict[str, Any]
    initializer: dict[str, Any]
    num_states: int  # words of optimizer state per value
    step: int
    rows: int
    parameters: list[Parameter] = []
    entry: dict[str, Any] = {}
    shrink: dict[str, Any] = {}

    @property
    def is_dense(self) -> bool:
        """One flat block; else rows by key."""
        return kind_named(self.kind).is_dense

    def spec(self) -> TableSpec:
        return TableSpec(
            self.name,
            self.kind,
            self.dim,
            self.size,
            msgspec.convert(self.rule, Rule),
            msgspec.convert(self.initializer, Initializer),
            self.seed,
            entry=msgspec.convert(self.entry, AdmissionEntry),
            shrink=msgspec.convert(self.shrink, Shrink),
        )


class Manifest(msgspec.Struct, frozen=True):
    """A saved model: the newest save of a chain, and those that it continues."""

    save: str  # the folder with the parts
    number: int
    kind: str  # "full", or "inference": without optimizer state
    num_servers: int
    tables: list[Table]
    parts: list[Part]
    format: str = FORMAT
    version: int = VERSION
    token: int = 0  # tells this save from every other
    parent: int = 0  # number of the save that this one continues; 0: a full save
    base: list[Link] = []  # the saves that it continues, the full one first
    time: float = 0.0  # by the clock of the tables
    is_time_set: bool = False  # by the job; else it is the wall clock's
    extra: dict[str, Any] = {}  # what the script keeps with its model

    def links(self) -> list[Link]:
        """The chain: a full save, and what changed since, in order."""
        return [*self.base, Link(self.save, self.number, self.parent, self.num_servers, self.parts, self.time)]

    def table(self, name: str) -> Table:
        for table in self.tables:
            if table.name == name:
                return table
        raise CheckpointError(f"no table '{name}' in it; it has {', '.join(table.name for table in self.tables)}")

    def parts_of(self, table: str) -> list[Part]:
        return [part for part in self.parts if part.table == table]


def described(spec: TableSpec, num_states: int, step: int, rows: int, parameters: list[Parameter]) -> Table:
    """A table's line in the manifest. Bounds that are infinite are left out: JSON has no word for them."""
    rule = {name: value for name, value in msgspec.structs.asdict(spec.rule).items() if value not in _INFINITE}
    first = msgspec.structs.asdict(spec.initializer)
    policies = msgspec.to_builtins(spec.entry), msgspec.to_builtins(spec.shrink)
    described = spec.name, spec.kind, spec.dim, spec.size, spec.seed, rule, first, num_states, step, rows, parameters
    return Table(*described, *policies)


def write_manifest(storage: Storage, manifest: Manifest) -> None:
    """The last act of saving: from here on the new model is the model."""
    write_body(storage, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(storage: Storage) -> Manifest:
    """Raises CheckpointError if there is no complete model, or if its manifest is damaged."""
    body, place = read_body(storage), storage.place(FILE)
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{place} is not a manifest of this version: {error}") from None
    if manifest.format != FORMAT or manifest.version not in READABLE:
        raise CheckpointError(
            f"{place}: expected {FORMAT} version {VERSION}, found {manifest.format} version {manifest.version}"
        )
    return manifest


def next_save(storage: Storage) -> int:
    """A number above those of all saves that are or were being made here."""
    numbers = [int(name[5:]) for name in storage.folders() if _SAVE.fullmatch(name)]
    if has_manifest(storage):
        with contextlib.suppress(CheckpointError):  # a damaged one is replaced
            numbers.append(read_manifest(storage).number)
    return max(numbers, default=0) + 1


def folder_of(number: int) -> str:
    return f"save-{number:06}"


def remove_others(storage: Storage, manifest: Manifest) -> None:
    """Folders of saves that are no part of the chain, and of those that never came to an end."""
    kept = {link.save for link in manifest.links()}
    for name in list(storage.folders()):
        if _SAVE.fullmatch(name) and name not in kept:
            storage.remove_folder(name)


def as_json(extra: Mapping[str, Any], function: str) -> dict[str, Any]:
    """What will be read back of `extra`; an error names the function that was given something else."""
    try:
        kept = msgspec.json.decode(msgspec.json.encode(dict(extra)))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{function}(extra=...): expected a dict that JSON can hold: {error}") from None
    assert isinstance(kept, dict)
    return kept
