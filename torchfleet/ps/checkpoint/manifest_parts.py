"""The contents of a manifest: tables of a saved model, its chain of saves, their part files, its parameters."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from torchfleet.base.errors import CheckpointError
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.row_format import RowFormat, saved_bytes
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec, kind_named
from torchfleet.ps.tables.table import PartKind

FORMAT = "torchfleet checkpoint"
VERSION = 2
_LEFT_OUT: tuple[Any, ...] = (math.inf, -math.inf, ())


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A dense parameter or buffer, and its place in its table's block."""

    name: str
    shape: list[int]
    start: int
    dtype: str = "float32"  # other types are kept as bytes: byte_words.py
    words: int = 0  # number of elements of the block that these bytes take

    @property
    def size(self) -> int:
        """The number of elements of the block that it takes."""
        return self.words if self.dtype != "float32" else math.prod(self.shape)

    @property
    def described(self) -> str:
        return f"{self.dtype} of shape {tuple(self.shape)}"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: rows of a sparse table, a range of a dense one, or data that belongs to rows (docs/checkpoints.md)."""

    table: str
    file: str
    shard: int = msgspec.field(name="part")  # of the table, numbered over the servers of the save
    rows: int
    bytes: int
    crc32: int
    start: int = 0  # dense: first element; sketch: first block
    kind: PartKind = "rows"
    repeats: int | None = None  # keys of the save, up to this part, that may be there twice; None: not known


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One save of a chain: a full one, or the changes since its parent."""

    save: str  # the folder with the parts
    number: int
    parent: int  # 0: a full save
    num_servers: int
    parts: list[Part]
    time: float = 0.0  # by the clock of the tables
    num_files: int = 0  # the number of parts

    def parts_of(self, table: str, kind: PartKind = "rows") -> list[Part]:
        return [part for part in self.parts if part.table == table and part.kind == kind]


class Saved(msgspec.Struct):
    """What one server has saved."""

    parts: list[Part]
    steps: dict[str, int]
    rows: dict[str, int]  # rows of the table, whether or not they are in this save
    time: float  # by the clock of the tables
    is_time_set: bool = False  # set by the job; otherwise the wall clock


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A saved table: its description and progress."""

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
    num_row_states: int = 0  # words of optimizer state per row, behind those of its values
    format: dict[str, Any] = {}  # the type of the values; left out: float32

    @property
    def num_words(self) -> int:
        """Words of a row: its values and all of their state."""
        return self.dim * (1 + self.num_states) + self.num_row_states

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a part file, without its key."""
        dtype = self.format.get("dtype", "float32")
        return 4 * (self.num_words - self.dim) + saved_bytes(dtype, self.dim)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the rule's state, as RowRule.state_names."""
        rule = self.spec().rule
        return rule.row_rule.state_names(rule)

    @property
    def is_dense(self) -> bool:
        """One flat block; otherwise rows by key."""
        return kind_named(self.kind).is_dense

    def spec(self) -> TableSpec:
        policies: dict[str, Any] = {}  # the defaults, which admit every key and drop no row, are left out
        if self.entry:
            policies["entry"] = msgspec.convert(self.entry, prepared(AdmissionEntry))
        if self.shrink:
            policies["shrink"] = msgspec.convert(self.shrink, prepared(Shrink))
        if self.format:
            policies["format"] = msgspec.convert(self.format, prepared(RowFormat))
        return TableSpec(
            self.name,
            self.kind,
            self.dim,
            self.size,
            msgspec.convert(self.rule, prepared(Rule)),
            msgspec.convert(self.initializer, prepared(Initializer)),
            self.seed,
            **policies,
        )


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A saved model: the newest save of a chain, and the saves that it continues."""

    save: str  # the folder with the parts
    number: int
    kind: str  # "full", or "inference": without optimizer state
    num_servers: int
    tables: list[Table]
    parts: list[Part]
    format: str = FORMAT
    version: int = VERSION
    token: int = 0  # identifies this save
    parent: int = 0  # number of the save that this one continues; 0: a full save
    base: list[Link] = []  # the saves that it continues, the full one first
    time: float = 0.0  # by the clock of the tables
    is_time_set: bool = False  # set by the job; otherwise the wall clock
    extra: dict[str, Any] = {}  # data that the script saves with its model
    num_files: int = 0  # the number of parts
    features: list[dict[str, Any]] = []  # that belong to the model: data/model_features.py

    def links(self) -> list[Link]:
        """The chain: a full save, and the deltas since, in order."""
        newest = self.save, self.number, self.parent, self.num_servers, self.parts, self.time, self.num_files
        return [*self.base, Link(*newest)]

    def table(self, name: str) -> Table:
        for table in self.tables:
            if table.name == name:
                return table
        names = ", ".join(table.name for table in self.tables)
        raise CheckpointError(f"the saved model has no table '{name}'; its tables are {names}")

    def parts_of(self, table: str) -> list[Part]:
        return [part for part in self.parts if part.table == table]


def described(spec: TableSpec, with_state: bool, step: int, rows: int, parameters: list[Parameter]) -> Table:
    """A table's entry in the manifest. Infinite bounds, which JSON cannot represent, are left out."""
    num_states, num_row_states = (spec.num_states, spec.num_row_states) if with_state else (0, 0)
    rule = {name: value for name, value in msgspec.structs.asdict(spec.rule).items() if value not in _LEFT_OUT}
    first = msgspec.structs.asdict(spec.initializer)
    policies = msgspec.to_builtins(spec.entry), msgspec.to_builtins(spec.shrink)
    described = spec.name, spec.kind, spec.dim, spec.size, spec.seed, rule, first, num_states, step, rows, parameters
    return Table(*described, *policies, num_row_states, msgspec.to_builtins(spec.format))
