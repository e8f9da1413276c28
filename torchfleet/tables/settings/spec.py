"""What a table is: the description that a client sends and a server builds from. Checked when it is made."""

from __future__ import annotations

import math
import zlib
from typing import Literal, get_args

import msgspec

from torchfleet.errors import TableError
from torchfleet.tables.settings.policy import Entry, Shrink

MAX_DIM = 1 << 16
MAX_FLOAT = 3.4028234663852886e38  # the largest float32
RuleName = Literal["sgd", "adagrad", "adam"]
InitializerName = Literal["constant", "uniform", "normal", "truncated_normal"]
MAX_SIZE = 1 << 48
MAX_PARTS = 1 << 16


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise TableError(text)


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer as the servers run it. The fields are those of torch.optim's class of the same name.

    `momentum`, `nesterov` and the weight decays act on dense tables only; a row that is touched now and then has no
    "every step" at which they could act. `low` and `high` bound sparse weights after each update.
    """

    name: RuleName = "sgd"
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
        _expect(self.name in get_args(RuleName), f"rule.name must be one of {get_args(RuleName)}, found {self.name!r}")
        for field in ("lr", "eps", "lr_decay", "initial_accumulator", "weight_decay"):
            _expect(0 <= getattr(self, field) <= MAX_FLOAT, f"rule.{field} must be >= 0, found {getattr(self, field)}")
        for field in ("beta1", "beta2", "momentum"):
            _expect(0 <= getattr(self, field) < 1, f"rule.{field} must be in [0, 1), found {getattr(self, field)}")
        _expect(self.low < self.high, f"rule.low must be below rule.high, found {self.low} and {self.high}")
        _expect(not self.nesterov or self.momentum > 0, "rule.nesterov needs rule.momentum > 0")


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
        _expect(
            abs(self.a) <= MAX_FLOAT and abs(self.b) <= MAX_FLOAT, f"initializer needs finite numbers, found {self}"
        )
        _expect(self.name != "uniform" or self.a <= self.b, f"uniform needs low <= high, found {self.a}, {self.b}")
        _expect("normal" not in self.name or self.b >= 0, f"{self.name} needs a deviation >= 0, found {self.b}")


class TableSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table: `sparse` (rows for any 64-bit key), `array` (rows for ids below size), `dense` (a block of size)."""

    name: str
    kind: Literal["sparse", "array", "dense"] = "sparse"
    dim: int = 1
    size: int = 0
    rule: Rule = Rule()
    initializer: Initializer = Initializer()
    seed: int = 0
    part: int = 0
    num_parts: int = 1
    entry: Entry = Entry()
    shrink: Shrink = Shrink()

    def __post_init__(self) -> None:
        _expect(0 < len(self.name) <= 200, f"a table's name has 1 to 200 characters, found {len(self.name)}")
        _expect(1 <= self.dim <= MAX_DIM, f"dim must be 1 to {MAX_DIM}, found {self.dim}")
        _expect(0 <= self.seed < 1 << 63, f"seed must be 0 to 2^63 - 1, found {self.seed}")
        _expect(1 <= self.num_parts <= MAX_PARTS, f"num_parts must be 1 to {MAX_PARTS}, found {self.num_parts}")
        _expect(0 <= self.part < self.num_parts, f"part must be below num_parts, found {self.part}")
        self._check_policies()
        if self.kind == "sparse":
            _expect(self.size == 0, "a sparse table has no size: use kind='array' for a declared number of ids")
        else:
            _expect(1 <= self.size <= MAX_SIZE, f"kind='{self.kind}' needs a size of 1 to 2^48, found {self.size}")
        if self.kind == "dense":
            _expect(self.dim == 1, f"a dense table is a flat block: dim must be 1, found {self.dim}")
            _expect(math.isinf(self.rule.low) and math.isinf(self.rule.high), "rule.low/high are for sparse tables")
            _expect(self.initializer == Initializer(), "a dense table starts as zeros: set it with set_dense")
        else:
            for field in ("momentum", "weight_decay"):
                _expect(getattr(self.rule, field) == 0, f"rule.{field} is for dense tables; '{self.name}' is sparse")

    def _check_policies(self) -> None:
        if self.kind != "sparse":
            _expect(self.entry == Entry(), f"entry is for tables of any id; '{self.name}' has a declared size")
            _expect(self.shrink == Shrink(), f"shrink is for tables of any id; '{self.name}' has a declared size")
        if not self.entry.show:
            wanting = sorted((self.entry.names | self.shrink.names) & {"show", "click", "score", "delta"})
            _expect(
                not wanting,
                f"the policies of table '{self.name}' look at {', '.join(wanting)}, which needs "
                "entry=fleet.ShowClickEntry(show, click) to say from which slots",
            )

    def for_part(self, part: int, num_parts: int) -> TableSpec:
        """The share of this table that one of `num_parts` servers holds."""
        return msgspec.structs.replace(self, part=part, num_parts=num_parts)

    @property
    def number(self) -> int:
        return table_number(self.name)

    @property
    def num_elements(self) -> int:
        """Of a dense table: how many elements this part holds."""
        start, stop = part_range(self.size, self.part, self.num_parts)
        return stop - start


def table_number(name: str) -> int:
    """How messages name a table. Clients and servers agree on it without asking each other."""
    return zlib.crc32(name.encode())


def part_range(size: int, part: int, num_parts: int) -> tuple[int, int]:
    """The elements of a dense table that part number `part` of `num_parts` holds: even cuts."""
    return size * part // num_parts, size * (part + 1) // num_parts
