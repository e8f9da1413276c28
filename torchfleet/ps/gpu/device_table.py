"""A table of rows in the memory of a device: find, gather, update, grow, evict, iterate."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from torchfleet.base.cuda_capture import is_capturing
from torchfleet.base.errors import TableError, WrongIds
from torchfleet.ps.gpu import device_errors, eviction, free_rows
from torchfleet.ps.gpu.admission import Admission, candidate_spec, check_entry
from torchfleet.ps.gpu.change_tracking import ChangeTracking
from torchfleet.ps.gpu.graph_capture import check_capture
from torchfleet.ps.gpu.kernels.kernel_choice import Kernels, kernels_for
from torchfleet.ps.gpu.kernels.plain_kernels import positions
from torchfleet.ps.gpu.kernels.plain_rules import check_rule
from torchfleet.ps.gpu.occupancy import Occupancy
from torchfleet.ps.gpu.row_blocks import Columns, RowBlock, joined, last_of_each, split
from torchfleet.ps.gpu.row_layout import RowLayout
from torchfleet.ps.gpu.table_memory import (
    ABSENT,
    EMPTY,
    LIMIT,
    MAX_SLOTS,
    OUTSIDE,
    PENDING,
    REFUSED,
    REMOVED,
    SPARE,
    STEP,
    empty_directory,
    new_memory,
)
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.tables.settings.spec import TableSpec

FIRST_ROWS = 1 << 20  # rows of a new table on a GPU that declares no capacity
FIRST_ROWS_ON_CPU = 1 << 10
MOST_REMOVED = 0.125  # share of the directory's entries; above it, the directory is made anew


class DeviceTable:
    """Rows for any 64-bit key. Keys are int64 tensors on the table's device; a slot (int32) is a row's number.

    A slot is valid while its row exists: rows do not move when the table grows, and only `remove`, `shrink` and the
    limit of `spec.shrink` end a row. Calls are issued to the current stream in order, and wait for the device only if
    their documentation says so. One thread uses a table at a time.

    `capacity`: rows that exist from the start; the table grows beyond them. `deterministic`: rows are numbered in the
    order of their keys, which makes results equal from run to run; slower where keys are new.
    """

    def __init__(
        self,
        spec: TableSpec,
        device: torch.device | str = "cuda",
        capacity: int | None = None,
        deterministic: bool = False,
    ) -> None:
        self.device = device_errors.checked_device(device, spec.name)
        check_rule(spec.rule, spec.name)
        eviction.check_policies(spec)
        check_entry(spec)
        self.spec, self.deterministic = spec, deterministic
        self.layout = RowLayout.of(spec)
        self.max_rows = eviction.row_limit(spec, spec.shrink, self.layout.width)
        first = FIRST_ROWS if self.device.type == "cuda" else FIRST_ROWS_ON_CPU
        with device_errors.naming(self, capacity or first):
            self.memory = new_memory(self.layout.width, self.max_rows or capacity or first, self.device)
        if self.max_rows is not None:
            self.memory.counters[LIMIT] = self.max_rows
        self.kernels: Kernels = kernels_for(self.device)
        self.occupancy = Occupancy(self.memory)
        self.num_evicted = 0
        self.has_capacity = capacity is not None
        self.is_captured = False  # a CUDA graph holds the addresses of the memory: it must not be replaced
        self.tracking: ChangeTracking | None = None  # from the first save on
        self._num_removed = 0  # entries of the directory marked REMOVED
        self.admission: Admission | None = None  # every id gets a row
        if not spec.entry.is_open:
            counted = candidate_spec(spec)
            self.admission = Admission(spec, None if counted is None else DeviceTable(counted, self.device))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def dim(self) -> int:
        return self.spec.dim

    @property
    def num_rows(self) -> int:
        """Rows in use. Waits for the device."""
        return self.occupancy.num_rows

    @property
    def capacity(self) -> int:
        """Rows that exist, in use or not."""
        return self.memory.rows.num_rows

    @property
    def num_bytes(self) -> int:
        """Device memory that the table holds."""
        counted = None if self.admission is None else self.admission.candidates
        return self.memory.num_bytes + (counted.memory.num_bytes if counted is not None else 0)

    @property
    def has_entry(self) -> bool:
        """Whether the table's entry may refuse an id a row at its first appearance."""
        return self.admission is not None

    @property
    def step(self) -> int:
        """Updates so far. Waits for the device."""
        return int(self.memory.counters[STEP])

    @step.setter
    def step(self, step: int) -> None:
        self.memory.counters[STEP] = step

    def find(self, keys: torch.Tensor, insert: bool = False, padding: int | None = None) -> torch.Tensor:
        """Slots of keys of any shape, flattened; negative for a key without a row, -1 for `padding`. Keys may repeat.

        `insert`: missing keys get a row with its first values if the entry of the table admits them, and the rows count
        as used. Raises TableError if there is no memory for them. Waits for the device if the table has an entry.
        """
        keys, inserts = self.begin(keys, insert, padding)
        slots = self.kernels.find(self.memory, self.layout, keys, inserts, padding, self.deterministic)
        self.end(slots, insert)
        return slots

    def gather(self, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(len(slots), dim): the values of these rows; zeros for -1, and NaN for a key that got no row in a graph."""
        return self.kernels.gather(self.memory, slots, self.dim, dtype)

    def find_and_gather(
        self,
        keys: torch.Tensor,
        insert: bool = False,
        dtype: torch.dtype = torch.float32,
        padding: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots, values), as `find` and `gather`, with one kernel less."""
        keys, inserts = self.begin(keys, insert, padding)
        how = inserts, dtype, padding, self.deterministic
        slots, values = self.kernels.find_and_gather(self.memory, self.layout, keys, *how)
        self.end(slots, insert)
        return slots, values

    def push(self, slots: torch.Tensor, grads: torch.Tensor, lr: float | torch.Tensor | None = None) -> None:
        """One update: the gradients of equal slots are summed, then the rule is applied once per row. -1 is left out.

        `grads`: (len(slots), dim), of any floating type. `lr` overrides the rule's own; a CUDA graph reads a tensor
        anew at every replay.
        """
        device_errors.check_gradients(self.name, grads, len(slots), self.dim)
        self.kernels.push(self.memory, self.layout, slots, grads, self.spec.rule.lr if lr is None else lr)
        self.mark(slots)

    def rows(self, num_rows: int = 1 << 18) -> Iterator[RowBlock]:
        """All rows in blocks, in the order of their slots. Waits for the device."""
        used, special = self.num_slots, self.slot_of_empty()
        for start in range(0, used, num_rows):
            slots = torch.arange(start, min(start + num_rows, used), device=self.device)
            keys = self.memory.row_keys[slots]
            slots = slots[(keys != EMPTY) | (slots == special)]
            words = self.memory.rows.read(slots, 0, self.layout.width)
            yield split(self.layout, self.memory.row_keys[slots], slots, words)

    def put(self, keys: torch.Tensor, words: torch.Tensor, columns: Columns | None = None) -> None:
        """Overwrite or create rows: `words` are values, or values and optimizer state. Statistics that are not given
        become those of a new row. Among equal keys the last one wins. The entry is not asked.
        Raises TableError if they do not fit.
        """
        keys = device_errors.checked_keys(keys, self.name, self.device)
        if words.shape not in ((len(keys), self.dim), (len(keys), self.layout.num_words)):
            raise TableError(
                f"table '{self.name}': expected rows of {self.dim} values or {self.layout.num_words} with state, found "
                f"{tuple(words.shape)} for {len(keys)} keys"
            )
        slots = self._insert(keys)
        kept = last_of_each(slots)
        slots, words = slots[kept].long(), words.to(self.device, torch.float32)[kept]
        self.memory.rows.write(slots, 0, words)
        if columns and self.layout.columns:
            block = joined(self.layout, {name: column[kept.to(column.device)] for name, column in columns.items()})
            self.memory.rows.write(slots, self.layout.num_words, block.to(self.device))

    def remove(self, keys: torch.Tensor) -> int:
        """Drop rows; keys without a row are ignored. Returns how many were dropped. Waits for the device."""
        keys = torch.unique(device_errors.checked_keys(keys, self.name, self.device))
        at, slots = positions(self.memory, keys)
        at, slots = at[slots >= 0], slots[slots >= 0]
        memory = self.memory
        memory.directory[at, 0] = torch.where(at < memory.num_positions, REMOVED, EMPTY)
        memory.directory[at, 1] = PENDING
        if self.tracking is not None:
            self.tracking.note_gone(memory.row_keys[slots])
        memory.row_keys[slots] = EMPTY
        self._num_removed += len(slots)
        has_refused = self.occupancy.known[REFUSED] > 0
        self._give_back(slots)
        if has_refused or self._num_removed > MOST_REMOVED * memory.num_positions:
            self._rebuild()
        return len(slots)

    def shrink(self, policy: Shrink | None = None) -> int:
        """Drop the rows that a policy (the table's own by default) names, as servers do. Returns how many."""
        num = eviction.shrink(self, policy or self.spec.shrink)
        self.num_evicted += num
        return num

    def reserve(self, num_rows: int) -> None:
        """Make room for this many rows beside those in use. Raises TableError if there is no memory. A CUDA graph
        cannot capture growth: reserve before.
        """
        room = self.occupancy.room
        if room < num_rows:
            self._grow(num_rows - room)

    def check(self) -> None:
        """Raise the error of an earlier lookup, as far as is known without waiting for the device: WrongIds for ids
        that are not below the table's declared size; TableError if there was no row for a key. Only a captured graph
        can run out of rows, and reads NaN for such a key.
        """
        known = self.occupancy.known
        if known[OUTSIDE]:
            raise WrongIds(
                f"table '{self.name}': {known[OUTSIDE]:,} ids are not in 0..{self.spec.size - 1:,}, its declared size"
            )
        if known[REFUSED]:
            raise device_errors.full(self, known[REFUSED])

    def begin(self, keys: torch.Tensor, insert: bool, padding: int | None) -> tuple[torch.Tensor, bool]:
        """Check the keys of a lookup, and make room for those that it inserts. Returns (keys, whether the kernel is to
        insert those that are missing).
        """
        keys = device_errors.checked_keys(keys, self.name, self.device)
        if insert and self.is_capturing:
            check_capture(self)
            self.is_captured = True
        elif insert and self.admission is not None:
            self._admit(self.admission, keys, padding)
            return keys, False
        elif insert:
            self._prepare(keys, padding)
        return keys, insert

    def _admit(self, admission: Admission, keys: torch.Tensor, padding: int | None) -> None:
        """Give rows to those of the keys that the entry admits now."""
        slots = self.kernels.find(self.memory, self.layout, keys, False, padding)
        self._stamp(slots)  # so that rows of this lookup are not evicted for its new ids
        is_missing = slots == ABSENT if padding is None else (slots == ABSENT) & (keys != padding)
        self._insert(admission.admit(torch.unique(keys[is_missing]), int(time.time())))

    def _insert(self, keys: torch.Tensor) -> torch.Tensor:
        """Slots of these keys; those without a row get one."""
        self._prepare(keys)
        slots = self.kernels.find(self.memory, self.layout, keys, True, None, self.deterministic)
        self.end(slots, insert=True)
        return slots

    def _prepare(self, keys: torch.Tensor, padding: int | None = None) -> None:
        """Make room for those of these keys that have no row. `padding`: an id among them that gets none."""
        self.check()
        if not self.occupancy.is_enough_for(len(keys)):
            self._make_room(keys, padding)

    def end(self, slots: torch.Tensor, insert: bool, is_joined: bool = False) -> None:
        """Note that a lookup was issued. `is_joined`: the caller begins the copy of the counters, which several tables
        share.
        """
        if insert:
            self.mark(slots)
            self._stamp(slots)
        if (insert or self.layout.size) and not self.is_capturing:
            note = self.occupancy.add if is_joined else self.occupancy.note
            note(len(slots) if insert else 0)
            if self.device.type == "cpu":
                self.check()

    def _stamp(self, slots: torch.Tensor) -> None:
        """Note in the statistics of these rows, if the table keeps any, that they are used."""
        if self.layout.columns:
            self.kernels.stamp(self.memory, self.layout, slots, int(time.time()))

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph captures what this thread issues."""
        return is_capturing(self.device)

    def _make_room(self, keys: torch.Tensor, padding: int | None) -> None:
        """Evict rows or grow, so that those of these keys that have no row get one. Raises TableError if they do not
        fit.
        """
        if padding is not None:
            keys = keys[keys != padding]
        if self.max_rows is not None:
            self.num_evicted += eviction.make_room(self, keys)
        elif not self._has_grown(max(len(keys) - self.occupancy.room, min(self.capacity, MAX_SLOTS - self.capacity))):
            num_new = int((self.find(torch.unique(keys)) < 0).sum())
            self.reserve(num_new)

    def _has_grown(self, num_rows: int) -> bool:
        """`_grow`, and whether it could: doubling makes growth rare, but may need more memory than there is."""
        try:
            self._grow(num_rows)
        except TableError:
            return False
        return True

    def _grow(self, num_rows: int) -> None:
        """Add at least `num_rows` rows. Raises TableError if the table must not grow, or has no memory for them."""
        num_rows = self.memory.rows.rounded(num_rows)
        if self.is_captured or self.max_rows is not None or self.capacity + num_rows > MAX_SLOTS:
            raise device_errors.full(self, num_rows)
        memory = self.memory
        with device_errors.naming(self, num_rows):
            keys = torch.full((num_rows,), EMPTY, dtype=torch.int64, device=self.device)
            keys = torch.cat([memory.row_keys, keys])
            free = torch.cat([memory.free, torch.zeros(num_rows, dtype=torch.int32, device=self.device)])
            needs_directory = int((self.capacity + num_rows) * SPARE) > memory.num_positions
            directory = empty_directory(self.capacity + num_rows, self.device) if needs_directory else None
            memory.rows.grow(num_rows)
        memory.row_keys, memory.free = keys, free
        memory.num_replaced += 1
        if directory is not None:
            special = self.slot_of_empty()
            memory.directory = directory
            self.kernels.place(memory, self.num_slots, special)
            self._num_removed = 0
        memory.counters[LIMIT] = memory.rows.num_rows
        self.occupancy.refresh()

    def _rebuild(self) -> None:
        """Make the directory anew, without the entries of rows that were removed."""
        free_rows.rebuild(self.memory, self.kernels, self.slot_of_empty())
        self._num_removed = 0

    def mark(self, slots: torch.Tensor) -> None:
        """Note for the next delta that these rows change. A table that a CUDA graph updates has no deltas."""
        if self.tracking is not None and not self.is_capturing:
            self.tracking.mark(slots)

    @property
    def num_slots(self) -> int:
        """Slots that were ever in use, from 0 on. Waits for the device."""
        return free_rows.num_used(self.memory)

    def slot_of_empty(self) -> int:
        """The slot of the key that equals EMPTY, or -1."""
        return free_rows.slot_of_empty(self.memory)

    def _give_back(self, slots: torch.Tensor) -> None:
        """Add these slots to the list of free ones."""
        free_rows.give_back(self.memory, slots)
        self.occupancy.refresh()
