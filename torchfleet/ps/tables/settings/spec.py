"""What a table is: the description that a client sends and a server builds from. Checked when it is made.

Two registries name what there is: RULES, the optimizers, and KINDS, the kinds of tables. ps/tables fills them whenever
it, or anything in it, is imported: tables/rules.py has one line per rule, tables/kinds.py one per kind.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.clock import Clock
from torchfleet.ps.tables.settings.policy import AdmissionEntry, Shrink

MAX_DIM = 1 << 16
MAX_FLOAT = 3.4028234663852886e38  # the largest float32
InitializerName = Literal["constant", "uniform", "normal", "truncated_normal"]
MAX_SIZE = 1 << 48
MAX_SHARDS = 1 << 16

Floats = npt.NDArray[np.float32]
RULES: dict[str, RowRule] = {}  # by the name that Rule gives
KINDS: dict[str, TableKind] = {}  # by the name that TableSpec gives


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise TableError(text)


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer as the servers run it. The fields are those of torch.optim's class of the same name.

    `momentum` and `nesterov` act on dense tables only; a row that is touched now and then has no "every step" at which
    they could act. `weight_decay` acts on the rows that an update touches, and on all of a dense table. `low` and
    `high` bound sparse weights after each update.
    """

    name: str = "sgd"
    lr: float = 0.01
    eps: float = 1e-10
    beta1: float = 0.9
    beta2: float = 0.999
    lr_decay: float = 0.0
    initial_accumulator: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decoupled_decay: bool = False
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        _expect(self.name in RULES, f"rule.name must be one of {tuple(RULES)}, found {self.name!r}")
        for field in ("lr", "eps", "lr_decay", "initial_accumulator", "weight_decay"):
            _expect(0 <= getattr(self, field) <= MAX_FLOAT, f"rule.{field} must be >= 0, found {getattr(self, field)}")
        for field in ("beta1", "beta2", "momentum"):
            _expect(0 <= getattr(self, field) < 1, f"rule.{field} must be in [0, 1), found {getattr(self, field)}")
        _expect(self.low < self.high, f"rule.low must be below rule.high, found {self.low} and {self.high}")
        _expect(not self.nesterov or self.momentum > 0, "rule.nesterov needs rule.momentum > 0")

    @property
    def has_bounds(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    @property
    def row_rule(self) -> RowRule:
        """What applies it."""
        return RULES[self.name]


class RowRule(ABC):
    """How one optimizer updates values: its formula, and the state that it keeps behind each value.

    A rule is one object without state of its own; `rule` holds the settings of the table at hand.
    """

    num_states: int  # numbers of state per value of a sparse row
    squares: tuple[int, ...] = ()  # which of them are sums of squares, and so never negative

    def num_dense_states(self, rule: Rule) -> int:
        """Numbers of state per value of a dense block."""
        return self.num_states

    def initial_state(self, rule: Rule) -> float:
        """What the state of a new row, and of a new block, is filled with."""
        return 0.0

    def rate(self, rule: Rule, lr: float, step: int) -> float:
        """The learning rate of update number `step` (1, 2, ...), where `lr` was asked for."""
        return lr

    def reach(self, rule: Rule, rate: float, step: int, grad: float, held: Sequence[float]) -> list[float] | None:
        """Bounds on the magnitude of values and of each number of state after one update.

        `held`: the bounds before it; `grad`: one on its gradients. None: not known, and every update is tried first.
        Rounding may double what is added. Of rows, no later update with the same bounds adds more.
        """
        return None

    @abstractmethod
    def apply_to_rows(
        self, rule: Rule, store: Floats, layout: tuple[int, int], at: Any, grads: Floats, rate: float, step: int
    ) -> None:
        """Update the rows numbered `at`, all different, by a gradient each; layout is (width, offset) of the store.

        A row is `width` numbers of the store. From `offset` on it holds its values, and then their state.
        """

    @abstractmethod
    def apply_to_block(
        self, rule: Rule, weights: Floats, states: Floats, grads: Floats, rate: float, step: int
    ) -> None:
        """Update a flat block; `states` has one row of len(weights) per number of state."""


class Initializer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First values of rows: constant (a), uniform from a to b, normal or truncated normal with mean a, deviation b."""

    name: InitializerName = "constant"
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        _expect(
            self.name in get_args(InitializerName),
            f"initializer.name must be one of {get_args(InitializerName)}, found {self.name!r}",
        )
        is_finite = math.isfinite(self.a) and math.isfinite(self.b) and self.largest <= MAX_FLOAT
        _expect(is_finite, f"initializer needs numbers that make finite first values, found {self}")
        _expect(self.name != "uniform" or self.a <= self.b, f"uniform needs low <= high, found {self.a}, {self.b}")
        _expect("normal" not in self.name or self.b >= 0, f"{self.name} needs a deviation >= 0, found {self.b}")

    @property
    def largest(self) -> float:
        """No first value is larger."""
        if self.name == "normal":
            return abs(self.a) + 9 * abs(self.b)  # 53 random bits reach 8.3 deviations
        return abs(self.a) + 2.01 * abs(self.b) if self.name == "truncated_normal" else max(abs(self.a), abs(self.b))


@dataclass(frozen=True)
class TableKind:
    """A kind of table: what clients and saved models must know of it, and what builds it on a server."""

    make: Callable[[TableSpec, int, Clock], Any]  # (spec, max_bytes, clock) → a tables.table.Table
    has_size: bool  # ids below a declared size, which servers own in turn; else any 64-bit key, by its hash
    is_dense: bool = False  # one flat block; else rows by key


def kind_named(name: str) -> TableKind:
    """Raises TableError, with the names that are known, if this is not one of them."""
    kind = KINDS.get(name)
    if kind is None:
        raise TableError(f"kind must be one of {tuple(KINDS)}, found {name!r}")
    return kind


class TableSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table: `sparse` (rows for any 64-bit key), `array` (rows for ids below size), `dense` (a block of size)."""

    name: str
    kind: str = "sparse"
    dim: int = 1
    size: int = 0
    rule: Rule = msgspec.field(default_factory=Rule)  # not a default: RULES is filled after this file is read
    initializer: Initializer = Initializer()
    seed: int = 0
    shard: int = msgspec.field(default=0, name="part")  # the names under which clients send them
    num_shards: int = msgspec.field(default=1, name="num_parts")
    entry: AdmissionEntry = AdmissionEntry()
    shrink: Shrink = Shrink()

    def __post_init__(self) -> None:
        kind = kind_named(self.kind)
        _expect(0 < len(self.name) <= 200, f"a table's name has 1 to 200 characters, found {len(self.name)}")
        _expect(1 <= self.dim <= MAX_DIM, f"dim must be 1 to {MAX_DIM}, found {self.dim}")
        _expect(0 <= self.seed < 1 << 63, f"seed must be 0 to 2^63 - 1, found {self.seed}")
        _expect(1 <= self.num_shards <= MAX_SHARDS, f"num_shards must be 1 to {MAX_SHARDS}, found {self.num_shards}")
        _expect(0 <= self.shard < self.num_shards, f"shard must be below num_shards, found {self.shard}")
        self._check_policies()
        if kind.has_size:
            _expect(1 <= self.size <= MAX_SIZE, f"kind='{self.kind}' needs a size of 1 to 2^48, found {self.size}")
        else:
            _expect(self.size == 0, f"a {self.kind} table has no size: use kind='array' for a declared number of ids")
        if kind.is_dense:
            _expect(self.dim == 1, f"a dense table is a flat block: dim must be 1, found {self.dim}")
            _expect(not self.rule.has_bounds, "rule.low/high are for sparse tables")
            _expect(self.initializer == Initializer(), "a dense table starts as zeros: set it with set_dense")
        else:
            _expect(self.rule.momentum == 0, f"rule.momentum is for dense tables; '{self.name}' is sparse")

    def _check_policies(self) -> None:
        if self.has_size:
            _expect(self.entry == AdmissionEntry(), f"entry is for tables of any id; '{self.name}' has a declared size")
            _expect(self.shrink == Shrink(), f"shrink is for tables of any id; '{self.name}' has a declared size")
        if not self.entry.show:
            wanting = sorted((self.entry.names | self.shrink.names) & {"show", "click", "score", "delta"})
            _expect(
                not wanting,
                f"the policies of table '{self.name}' look at {', '.join(wanting)}, which needs "
                "entry=fleet.ShowClickEntry(show, click) to say from which slots",
            )

    def for_shard(self, shard: int, num_shards: int) -> TableSpec:
        """What one of `num_shards` servers holds of this table."""
        return msgspec.structs.replace(self, shard=shard, num_shards=num_shards)

    @property
    def number(self) -> int:
        return table_number(self.name)

    @property
    def is_dense(self) -> bool:
        """One flat block; else rows by key."""
        return KINDS[self.kind].is_dense

    @property
    def has_size(self) -> bool:
        """Ids below a declared size; else any 64-bit key."""
        return KINDS[self.kind].has_size

    @property
    def num_states(self) -> int:
        """Numbers of optimizer state behind each value."""
        row_rule = self.rule.row_rule
        return row_rule.num_dense_states(self.rule) if self.is_dense else row_rule.num_states

    @property
    def num_elements(self) -> int:
        """Of a dense table: how many elements this shard holds."""
        start, stop = shard_range(self.size, self.shard, self.num_shards)
        return stop - start


def differences(one: msgspec.Struct, other: msgspec.Struct, prefix: str = "") -> tuple[str, str]:
    """The fields in which two descriptions differ, as each of them has it: ("dim=8, rule.lr=0.1", "dim=4, ...")."""
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
    """How messages name a table. Clients and servers agree on it without asking each other."""
    return zlib.crc32(name.encode())


def shard_range(size: int, shard: int, num_shards: int) -> tuple[int, int]:
    """The elements of a dense table that shard number `shard` of `num_shards` holds: even cuts."""
    return size * shard // num_shards, size * (shard + 1) // num_shards
