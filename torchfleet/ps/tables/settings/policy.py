"""The declarations of admission (which keys get a row) and eviction (which rows are dropped)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from torchfleet.base.errors import TableError
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.tables.settings.expressions import parse

ADMISSION_NAMES = ("count", "show", "click", "score", "age_days", "unseen_days", "slot")
EVICTION_NAMES = ("show", "click", "score", "delta", "slot", "age_days", "unseen_days", "norm")
MAX_COUNT = 1 << 30
MAX_WINDOW_COUNT = 255  # a counter of the window is one byte
BLOCK_BYTES = 64  # of the window's counters
NUM_BLOCKS_STEP = 5040  # divisible by every number of servers up to 10 and by many more, so that a block has one owner
_MAX_DAYS = 36_500.0
MAX_SHARE = 0.5  # default for the share of its rows that a table may lose in one shrink
_MAX_WEIGHT = 1e9  # limit for the weights of shows and clicks, so that scores stay finite


class AdmissionEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a key gets a row: when all conditions given here hold. The default admits every key at once."""

    count: int = 1
    probability: float = 1.0
    window_count: int = 1
    window_hours: float = 0.0
    window_bytes: int = 0
    predicate: str = ""
    show: str = ""  # names of slots with one number per sample
    click: str = ""
    show_click_decay_rate: float = 1.0  # per day
    nonclick_weight: float = 0.1
    click_weight: float = 1.0

    def __post_init__(self) -> None:
        _expect(1 <= self.count <= MAX_COUNT, f"CountFilterEntry: n must be 1 to 2^30, found {self.count}")
        _expect(0 <= self.probability <= 1, f"ProbabilityEntry: p must be 0 to 1, found {self.probability}")
        _expect(
            1 <= self.window_count <= MAX_WINDOW_COUNT,
            f"WindowCountEntry: n must be 1 to {MAX_WINDOW_COUNT}, found {self.window_count}",
        )
        _expect(0 <= self.window_hours <= 24 * _MAX_DAYS, f"WindowCountEntry: hours > 0, found {self.window_hours}")
        _expect(self.window_bytes >= 0, f"WindowCountEntry: max_bytes must be positive, found {self.window_bytes}")
        _expect(bool(self.window_hours) == bool(self.window_bytes), "WindowCountEntry: set both hours and max_bytes")
        _expect(bool(self.show) == bool(self.click), "ShowClickEntry: name both slots, of shows and of clicks")
        _expect(
            0 < self.show_click_decay_rate <= 1,
            f"show_click_decay_rate must be above 0 and at most 1, found {self.show_click_decay_rate}",
        )
        for field in ("nonclick_weight", "click_weight"):
            weight = getattr(self, field)
            _expect(abs(weight) <= _MAX_WEIGHT, f"{field} must be a number up to {_MAX_WEIGHT:g}, found {weight}")
        if self.predicate:
            parse(self.predicate, ADMISSION_NAMES)

    @property
    def names(self) -> frozenset[str]:
        """The statistics that the predicate reads."""
        return parse(self.predicate, ADMISSION_NAMES).names if self.predicate else frozenset()

    @property
    def num_blocks(self) -> int:
        """Blocks of the window's counters, over all servers."""
        steps = max(1, self.window_bytes // (BLOCK_BYTES * NUM_BLOCKS_STEP)) if self.window_hours else 0
        return steps * NUM_BLOCKS_STEP

    @property
    def is_open(self) -> bool:
        """Whether every key is admitted at its first appearance."""
        return (self.count, self.probability, self.window_count, self.predicate) == (1, 1.0, 1, "")


class Shrink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which rows are dropped: those for which any of these conditions holds. None: no condition.

    `max_rows` and `max_bytes` apply to the whole table, over all servers: above them the least recently looked-up rows
    are dropped. Both are also enforced between shrinks, when a new row would exceed them.
    """

    delete_after_unseen_days: float | None = None
    delete_threshold: float | None = None  # on the score
    ttl_days: float | None = None
    max_rows: int | None = None
    max_bytes: int | None = None
    min_norm: float | None = None
    where: str | None = None
    every_hours: float | None = None
    max_share: float = (
        MAX_SHARE  # of the rows: a shrink that would drop more drops none (does not limit max_rows and max_bytes)
    )

    def __post_init__(self) -> None:
        self._check_types()
        _expect(0 < self.max_share <= 1, f"Shrink: max_share must be above 0 and at most 1, found {self.max_share}")
        for field in ("delete_after_unseen_days", "ttl_days"):
            days = getattr(self, field)
            _expect(days is None or 0 <= days <= _MAX_DAYS, f"Shrink: {field} must be 0 to {_MAX_DAYS:g}, found {days}")
        for field in ("delete_threshold", "min_norm"):
            value = getattr(self, field)
            _expect(value is None or math.isfinite(value), f"Shrink: {field} must be a number, found {value}")
        for field in ("max_rows", "max_bytes"):
            num = getattr(self, field)
            _expect(num is None or 1 <= num < 1 << 60, f"Shrink: {field} must be at least 1, found {num}")
        _expect(
            self.every_hours is None or 1e-3 <= self.every_hours <= 24 * _MAX_DAYS,
            f"Shrink: every_hours must be positive, found {self.every_hours}",
        )
        _expect(
            self.every_hours is None or self.drops_any,
            "Shrink: every_hours needs a condition for the rows to drop (delete_after_unseen_days, ttl_days, ...)",
        )
        if self.where is not None:
            parse(self.where, EVICTION_NAMES)

    def _check_types(self) -> None:
        fields = "delete_after_unseen_days", "delete_threshold", "ttl_days", "min_norm", "every_hours", "max_share"
        for field in fields:
            _expect_number(f"Shrink: {field}", getattr(self, field), (int, float), "a number")
        for field in ("max_rows", "max_bytes"):
            _expect_number(f"Shrink: {field}", getattr(self, field), (int,), "a whole number")
        _expect(
            self.where is None or isinstance(self.where, str), f"Shrink: where must be a text, found {self.where!r}"
        )

    @property
    def drops_any(self) -> bool:
        """Whether any condition is set."""
        return msgspec.structs.replace(self, every_hours=None, max_share=MAX_SHARE) != Shrink()

    @property
    def names(self) -> frozenset[str]:
        """The statistics that the policy reads, by their names in expressions."""
        found = set(parse(self.where, EVICTION_NAMES).names) if self.where is not None else set()
        for field, name in (
            ("delete_after_unseen_days", "unseen_days"),
            ("delete_threshold", "score"),
            ("ttl_days", "age_days"),
            ("max_rows", "tick"),
            ("max_bytes", "tick"),
            ("min_norm", "norm"),
        ):
            if getattr(self, field) is not None:
                found.add(name)
        return frozenset(found)


def CountFilterEntry(n: int) -> AdmissionEntry:
    """A key gets its row at its n-th appearance: a pull for training, counted once per batch."""
    return _made(count=n)


def ProbabilityEntry(p: float) -> AdmissionEntry:
    """A key is admitted with probability p, decided by a hash of the key: the same decision every time."""
    return _made(probability=p)


def WindowCountEntry(n: int, hours: float = 24.0, max_bytes: int = 64 << 20) -> AdmissionEntry:
    """A key gets its row at its n-th appearance within the last `hours`, counted in `max_bytes` of memory in all.

    Keys whose hashes collide share counters: a key may be admitted early, but never late.
    """
    _expect_number("WindowCountEntry: hours", hours, (int, float), "a number")
    _expect_number("WindowCountEntry: max_bytes", max_bytes, (int,), "a whole number")
    _expect(hours > 0, f"WindowCountEntry: hours must be positive, found {hours}")
    _expect(max_bytes > 0, f"WindowCountEntry: max_bytes must be positive, found {max_bytes}")
    return _made(window_count=n, window_hours=float(hours), window_bytes=max_bytes)


def ShowClickEntry(
    show: str,
    click: str,
    show_click_decay_rate: float = 0.98,
    nonclick_weight: float = 0.1,
    click_weight: float = 1.0,
) -> AdmissionEntry:
    """Keep shows and clicks per row, read from the slots with these names; they decay by the rate per day.

    score = nonclick_weight * (show - click) + click_weight * click
    """
    return _made(
        show=show,
        click=click,
        show_click_decay_rate=show_click_decay_rate,
        nonclick_weight=nonclick_weight,
        click_weight=click_weight,
    )


def PredicateEntry(predicate: str) -> AdmissionEntry:
    """A key gets its row at the first appearance at which the predicate holds. See docs/online.md for the language.

    Names: count (appearances, this one included), show, click, score (with ShowClickEntry), age_days (since the first
    appearance), unseen_days (since the previous appearance), slot.
    """
    _expect(bool(predicate), "PredicateEntry: expected a condition like 'count >= 3', found nothing")
    return _made(predicate=predicate)


def combined(entry: AdmissionEntry | Sequence[AdmissionEntry] | None) -> AdmissionEntry:
    """Combine several entries into one: all of them must admit. Raises TableError if two set a field differently."""
    if entry is None:
        return AdmissionEntry()
    if isinstance(entry, AdmissionEntry):
        return entry
    if not isinstance(entry, (list, tuple)) or not all(isinstance(condition, AdmissionEntry) for condition in entry):
        raise TableError(
            f"entry: expected fleet.CountFilterEntry(n), another entry, or a list of them; found {entry!r}"
        )
    settings: dict[str, object] = {}
    for condition in entry:
        for field, value in msgspec.structs.asdict(condition).items():
            if value == getattr(AdmissionEntry(), field):
                continue
            before = settings.get(field, value)
            _expect(before == value, f"entry: two of them set {field}, to {before} and to {value}")
            settings[field] = value
    return msgspec.convert(settings, prepared(AdmissionEntry))


def _made(**settings: object) -> AdmissionEntry:
    """An entry with its types and values checked: users declare entries."""
    try:
        return msgspec.convert(settings, prepared(AdmissionEntry))
    except msgspec.ValidationError as error:
        raise TableError(f"entry: {error}") from None


def _expect_number(what: str, value: object, kinds: tuple[type, ...], expected: str) -> None:
    """Accepts None, which means that the setting was not given."""
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    _expect(value is None or is_number, f"{what} must be {expected}, found {value!r}")


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise TableError(text)
