"""The description of a table, which a client sends and a server builds from. Checked on construction.

Two registries list what exists: RULES, the optimizers (settings/rule.py), and KINDS, the kinds of tables. Both are
filled whenever anything of ps/tables is imported: tables/rules has one line per rule, tables/kinds.py one per kind.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.ps.tables.settings.row_format import FLOAT32, RowFormat, value_words
from torchfleet.ps.tables.settings.rule import MAX_FLOAT, RULES, Floats, RowRule, Rule, expect
from torchfleet.ps.tables.settings.storage import IN_MEMORY, TierStorage

__all__ = [  # includes the names of settings/rule.py: a table's description contains its rule
    "KINDS",
    "MAX_DIM",
    "MAX_FLOAT",
    "MAX_SHARDS",
    "MAX_SIZE",
    "RULES",
    "Floats",
    "Initializer",
    "InitializerName",
    "RowRule",
    "Rule",
    "TableKind",
    "TableSpec",
    "default_kind",
    "differences",
    "kind_named",
    "shard_range",
    "table_number",
]

MAX_DIM = 1 << 16
InitializerName = Literal["constant", "uniform", "normal", "truncated_normal"]
MAX_SIZE = 1 << 48
MAX_SHARDS = 1 << 16

KINDS: dict[str, TableKind] = {}  # by the name that TableSpec gives


class Initializer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First values of rows: constant (a), uniform from a to b, normal or truncated normal with mean a, deviation b."""

    name: InitializerName = "constant"
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        expect(
            self.name in get_args(InitializerName),
            f"initializer.name must be one of {get_args(InitializerName)}, found {self.name!r}",
        )
        is_finite = math.isfinite(self.a) and math.isfinite(self.b) and self.largest <= MAX_FLOAT
        expect(is_finite, f"initializer needs numbers that make finite first values, found {self}")
        expect(self.name != "uniform" or self.a <= self.b, f"uniform needs low <= high, found {self.a}, {self.b}")
        expect("normal" not in self.name or self.b >= 0, f"{self.name} needs a deviation >= 0, found {self.b}")

    @property
    def largest(self) -> float:
        """An upper bound of the magnitude of initial values."""
        if self.name == "normal":
            return abs(self.a) + 9 * abs(self.b)  # 53 random bits reach 8.3 deviations
        return abs(self.a) + 2.01 * abs(self.b) if self.name == "truncated_normal" else max(abs(self.a), abs(self.b))


@dataclass(frozen=True)
class TableKind:
    """A kind of table: what clients and saved models need to know about it, and its constructor on a server."""

    make: Callable[[TableSpec, int, Clock], Any]  # (spec, max_bytes, clock) → a tables.table.Table
    has_size: bool  # ids below a declared size, owned by servers round-robin; otherwise any 64-bit key, by its hash
    is_dense: bool = False  # one flat block; otherwise rows by key
    samples: Callable[[], Iterable[TableSpec]] | None = None  # tables that use all of its kernels, to warm them up
    has_formats: bool = False  # values in other types than float32, on the servers and on the network


def default_kind(is_dense: bool, has_size: bool) -> str:
    """The name of the default kind for a model's tables: the first that was registered."""
    return next(name for name, kind in KINDS.items() if (kind.is_dense, kind.has_size) == (is_dense, has_size))


def kind_named(name: str) -> TableKind:
    """The kind with this name. Raises TableError, which lists the known names, for an unknown name."""
    kind = KINDS.get(name)
    if kind is None:
        raise TableError(f"kind must be one of {tuple(KINDS)}, found {name!r}")
    return kind


ZEROS = Initializer()
EVERY_KEY, NO_SHRINK = AdmissionEntry(), Shrink()  # the policies of most tables


class TableSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A table: `sparse` (rows for any 64-bit key), `array` (rows for ids below size), `dense` (a block of size)."""

    name: str
    kind: str = "sparse"
    dim: int = 1
    size: int = 0
    rule: Rule = msgspec.field(default_factory=Rule)  # a factory, because RULES is filled after this file is imported
    initializer: Initializer = ZEROS
    seed: int = 0
    shard: int = msgspec.field(default=0, name="part")  # "part" is the field's name in messages
    num_shards: int = msgspec.field(default=1, name="num_parts")
    entry: AdmissionEntry = EVERY_KEY
    shrink: Shrink = NO_SHRINK
    storage: TierStorage = IN_MEMORY
    format: RowFormat = FLOAT32

    def __post_init__(self) -> None:
        kind = kind_named(self.kind)
        expect(0 < len(self.name) <= 200, f"a table's name has 1 to 200 characters, found {len(self.name)}")
        expect(1 <= self.dim <= MAX_DIM, f"dim must be 1 to {MAX_DIM}, found {self.dim}")
        expect(0 <= self.seed < 1 << 63, f"seed must be 0 to 2^63 - 1, found {self.seed}")
        expect(1 <= self.num_shards <= MAX_SHARDS, f"num_shards must be 1 to {MAX_SHARDS}, found {self.num_shards}")
        expect(0 <= self.shard < self.num_shards, f"shard must be below num_shards, found {self.shard}")
        self._check_policies()
        expect(
            self.format == FLOAT32 or kind.has_formats,
            f"dtype and wire: table '{self.name}' is of kind '{self.kind}', which has float32 values only",
        )
        is_kept = self.storage == IN_MEMORY or not (kind.has_size or kind.is_dense)
        expect(is_kept, f"storage is for tables of any id; '{self.name}' has a declared size")
        if kind.has_size:
            expect(1 <= self.size <= MAX_SIZE, f"kind='{self.kind}' needs a size of 1 to 2^48, found {self.size}")
        else:
            expect(self.size == 0, f"a {self.kind} table has no size: use kind='array' for a declared number of ids")
        if kind.is_dense:
            expect(self.dim == 1, f"a dense table is a flat block: dim must be 1, found {self.dim}")
            expect(not self.rule.has_bounds, "rule.low/high are for sparse tables")
            expect(self.initializer == ZEROS, "a dense table starts as zeros: set it with set_dense")
        else:
            refused = self.rule.row_rule.refused_on_rows(self.rule)
            expect(not refused, f"rule.{refused} is not for rows of '{self.rule.name}'; '{self.name}' is sparse")
            expect(
                not (self.format.is_narrow and self.rule.has_bounds),
                f"table '{self.name}' has dtype='{self.format.dtype}' and weight_bounds (rule.low/high): rounding may "
                "go beyond the bounds. Leave one of them out.",
            )

    def _check_policies(self) -> None:
        if self.has_size:
            expect(self.entry == EVERY_KEY, f"entry is for tables of any id; '{self.name}' has a declared size")
            expect(self.shrink == NO_SHRINK, f"shrink is for tables of any id; '{self.name}' has a declared size")
        if not self.entry.show:
            wanting = sorted((self.entry.names | self.shrink.names) & {"show", "click", "score", "delta"})
            expect(
                not wanting,
                f"the policies of table '{self.name}' read {', '.join(wanting)}: set "
                "entry=fleet.ShowClickEntry(show, click), which names the slots that show and click come from",
            )

    def for_shard(self, shard: int, num_shards: int) -> TableSpec:
        """The description of one shard of this table."""
        return msgspec.structs.replace(self, shard=shard, num_shards=num_shards)

    def has_rows_of(self, other: TableSpec) -> bool:
        """Whether tables of both descriptions have the same rows. Where they lie, and in how much memory, is no part
        of what they are."""
        return msgspec.structs.replace(self, storage=other.storage) == other

    def in_memory(self, rule: Rule | None = None) -> TableSpec:
        """The description of a table with the same rows for use in one process: unsharded, any id, no policies."""
        return msgspec.structs.replace(
            self,
            kind=default_kind(is_dense=False, has_size=False),
            size=0,
            rule=rule or self.rule,
            shard=0,
            num_shards=1,
            entry=EVERY_KEY,
            shrink=NO_SHRINK,
            storage=IN_MEMORY,
            format=msgspec.structs.replace(self.format, wire=""),
        )

    @functools.cached_property
    def number(self) -> int:
        """The table's number in messages."""
        return table_number(self.name)

    @functools.cached_property
    def is_dense(self) -> bool:
        """Whether it is one flat block; otherwise rows by key."""
        return KINDS[self.kind].is_dense

    @functools.cached_property
    def has_size(self) -> bool:
        """Whether ids are below a declared size; otherwise any 64-bit key."""
        return KINDS[self.kind].has_size

    @functools.cached_property
    def num_states(self) -> int:
        """Numbers of optimizer state per value."""
        row_rule = self.rule.row_rule
        return row_rule.num_dense_states(self.rule) if self.is_dense else row_rule.num_value_states(self.rule)

    @functools.cached_property
    def num_row_states(self) -> int:
        """Numbers of optimizer state per sparse row, behind those of its values."""
        return 0 if self.is_dense else self.rule.row_rule.num_row_states(self.rule)

    @property
    def num_words(self) -> int:
        """Numbers of a row: its values and all of their state."""
        return self.dim * (1 + self.num_states) + self.num_row_states

    @functools.cached_property
    def stored_words(self) -> int:
        """32-bit words of a row on a server: its values, in the table's type, and their state."""
        return value_words(self.format.dtype, self.dim) + self.num_words - self.dim

    @property
    def num_elements(self) -> int:
        """The number of elements that this shard of a dense table holds."""
        start, stop = shard_range(self.size, self.shard, self.num_shards)
        return stop - start


def differences(one: msgspec.Struct, other: msgspec.Struct, prefix: str = "") -> tuple[str, str]:
    """The fields in which two descriptions differ, with the values of each: ("dim=8, rule.lr=0.1", "dim=4, ...")."""
    texts: list[tuple[str, str]] = []
    for field in one.__struct_fields__:
        a, b = getattr(one, field), getattr(other, field)
        if type(a) is type(b) and isinstance(a, msgspec.Struct) and a != b:
            texts.append(differences(a, b, f"{prefix}{field}."))
        elif a != b:
            texts.append((f"{prefix}{field}={a!r}", f"{prefix}{field}={b!r}"))
    left, right = zip(*texts, strict=True) if texts else ((), ())
    return ", ".join(left), ", ".join(right)


def table_number(name: str) -> int:
    """The table's number in messages. Computed from the name, so clients and servers agree on it without asking."""
    return zlib.crc32(name.encode())


def shard_range(size: int, shard: int, num_shards: int) -> tuple[int, int]:
    """The elements of a dense table that shard number `shard` of `num_shards` holds: an even split."""
    return size * shard // num_shards, size * (shard + 1) // num_shards
