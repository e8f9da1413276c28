"""Saves of tables on devices in the files of servers, and loads of them: full saves, deltas and saves for prediction.

Rows go to the host in blocks. A block is copied within the device on the stream of training, so that every row in it is
from one moment, and from there to the host on a stream of its own, while training goes on. The next block is on its way
while threads write the last ones.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from torchfleet.base.errors import CheckpointError, TableError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Part, Table, described
from torchfleet.ps.checkpoint.part_file import Arrays
from torchfleet.ps.checkpoint.part_writer import Files
from torchfleet.ps.gpu.change_tracking import ChangeTracking
from torchfleet.ps.gpu.device_table import DeviceTable
from torchfleet.ps.gpu.row_blocks import RowBlock, split
from torchfleet.ps.gpu.staging import Staging
from torchfleet.ps.gpu.table_memory import EMPTY
from torchfleet.ps.server.state.saves import Chain
from torchfleet.ps.tables.rows.keymap import Keys
from torchfleet.ps.tables.settings.spec import Floats
from torchfleet.ps.tables.table import PartKind, SavedSlice, SaveMode
from torchfleet.ps.tables.update_bounds import check_block, check_squares

FILES_OF_RANK = 1_000_000
BLOCK_BYTES = 1 << 25  # of rows that are copied at once, and of a file: microseconds of a GPU's memory
_AHEAD = 2  # blocks on their way to the host
_PAUSE = 0.01  # seconds
_WRITERS = 4  # threads that write files and compute their checksums
_OWN: tuple[Literal["C"], Literal["W"]] = ("C", "W")  # arrays that torch may view: what files hold is read-only


class BlockOnItsWay(NamedTuple):
    """Rows that are being copied to the host."""

    keys: torch.Tensor
    slots: torch.Tensor
    words: torch.Tensor
    is_finite: torch.Tensor
    arrival: Any = None  # CUDA event after which the tensors above are there; None without a GPU


class TableSaves:
    """A table on a device as saves and loads see it: RowTable of ps/tables/table.py. It tracks changes from its first
    full save or load on.
    """

    def __init__(self, table: DeviceTable) -> None:
        self.table, self.spec = table, table.spec
        counted = None if table.admission is None else table.admission.candidates
        self.counted = TableSaves(counted) if isinstance(counted, DeviceTable) else None  # ids that have no row yet
        self._chain = Chain()
        self._has_pinned = False
        self._staging: Staging | None = None  # while a save is loaded onto a GPU
        self._side = torch.cuda.Stream(table.device) if table.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def step(self) -> int:
        return self.table.step

    @step.setter
    def step(self, step: int) -> None:
        self.table.step = step

    @property
    def num_words(self) -> int:
        return self.spec.num_words

    @property
    def num_rows(self) -> int:
        return self.table.num_rows

    # Saves

    def begin(self, token: int, parent: int, mode: SaveMode) -> None:
        """Begin a save that continues `parent`. Raises CheckpointError if a delta cannot continue it."""
        if mode == "inference":
            return
        if mode == "delta" and self.table.is_captured:
            raise CheckpointError(
                f"table '{self.spec.name}' is updated by a CUDA graph, which notes no changes for a delta: make a full "
                "save (mode=0)"
            )
        is_committed = self._chain.begin(token, parent, mode == "delta")
        self._begin_tracking(is_committed)

    def _begin_tracking(self, is_committed: bool) -> None:
        """Begin a generation of changes, of rows and of the ids that are counted."""
        self.table.tracking = self.table.tracking or ChangeTracking(self.table)
        self.table.tracking.begin(is_committed)
        if self.counted is not None:
            self.counted._begin_tracking(is_committed)

    def gone(self) -> Iterator[tuple[Keys, Arrays]]:
        """Keys that a delta deletes."""
        assert isinstance(self.table.tracking, ChangeTracking)
        keys = self.table.tracking.gone
        keys = keys[self.table.find(keys) < 0]
        yield keys.cpu().numpy().view(np.uint64), {}

    def live(self, mode: SaveMode) -> Iterator[tuple[Keys, Arrays]]:
        """(keys, arrays) of the rows that a save must write, in blocks. Training may go on in another thread if the
        table is on a GPU: a row that exists throughout comes exactly once.
        """
        num_words = None if mode != "inference" else self.spec.dim
        for block in self._blocks(mode == "delta"):
            arrays = block.arrays(num_words)
            if mode == "inference":
                arrays = {name: arrays[name] for name in ("keys", "rows")}
            keys = arrays.pop("keys")
            arrays.pop("delta", None)  # accumulated since the last save
            yield keys, arrays

    def candidates(self, mode: SaveMode) -> Iterator[tuple[Keys, Arrays]]:
        """As `live`, of the ids that the entry counts and that have no row: their statistics."""
        assert self.counted is not None
        assert self.table.admission is not None
        for block in self.counted._blocks(mode == "delta"):
            yield block.keys.cpu().numpy().view(np.uint64), self.table.admission.arrays_of(block)

    def _blocks(self, only_changed: bool) -> Iterator[RowBlock]:
        table, tracking = self.table, self.table.tracking
        num_rows = max(1, BLOCK_BYTES // (4 * table.layout.width))
        used = table.num_slots
        self._make_pinned_memory()
        on_their_way: deque[BlockOnItsWay] = deque()
        for start in range(0, used, num_rows):
            stop = min(start + num_rows, used)
            slots = torch.arange(start, stop, device=table.device)
            if only_changed:
                assert isinstance(tracking, ChangeTracking)
                slots = tracking.changed(start, stop)
            on_their_way.append(self._read(slots))
            if len(on_their_way) > _AHEAD:
                yield self._arrived(on_their_way.popleft())
        while on_their_way:
            yield self._arrived(on_their_way.popleft())

    def _make_pinned_memory(self) -> None:
        """Have torch allocate the host memory of all blocks that are on their way at once, with pauses: the driver
        launches no kernel while it pins memory. Torch keeps it for the blocks.
        """
        held = []
        for _ in range(0 if self._side is None or self._has_pinned else _AHEAD + _WRITERS + 2):
            held.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True))
            time.sleep(_PAUSE)
        self._has_pinned = True

    def _read(self, slots: torch.Tensor) -> BlockOnItsWay:
        """Copy the rows in use among these slots to the host. A slot that got another key meanwhile is left out: its
        new row belongs to the next save.
        """
        memory = self.table.memory
        keys = memory.row_keys[slots]
        words = memory.rows.read(slots, 0, self.table.layout.width)
        again = memory.row_keys[slots]
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.table.device))
        with contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side):
            if self._side is not None:
                for tensor in (slots, keys, words, again):
                    tensor.record_stream(self._side)
            special = memory.directory[memory.num_positions]
            is_special = (slots == special[1]) & (special[0] != EMPTY)
            kept = ((keys == again) & ((keys != EMPTY) | is_special)).nonzero().squeeze(1)
            if len(kept) < len(slots):
                keys, slots, words = (tensor.index_select(0, kept) for tensor in (keys, slots, words))
            is_finite = words.isfinite().all()
            block = BlockOnItsWay(*map(self._to_host, (keys, slots, words, is_finite)))
            return block if self._side is None else block._replace(arrival=self._side.record_event())

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._side is None:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def _arrived(self, block: BlockOnItsWay) -> RowBlock:
        if block.arrival is not None:
            block.arrival.synchronize()
        if not bool(block.is_finite):
            raise CheckpointError(
                f"table '{self.spec.name}' holds NaN or infinity: a model with it would not load. Nothing was replaced."
            )
        return split(self.table.layout, block.keys, block.slots, block.words)

    # Loads

    def reserve(self, num_rows: int) -> None:
        self.table.reserve(num_rows)
        if self._side is not None:
            device = self.table.device
            self._staging = Staging(device, torch.cuda.current_stream(device))

    def check_values(self, keys: Keys, values: Floats) -> None:
        """As RowTable.check_values."""
        num_words = self.num_words if values.shape[1:] == (self.num_words,) else self.spec.dim
        check_block(self.spec, keys, values, num_words, f"values (or {self.num_words} with state)")
        if num_words > self.spec.dim:
            check_squares(self.spec, keys, values)

    def load_slice(self, saved: SavedSlice) -> None:
        """As RowTable.load_slice. Of keys without a row, loads only what this table's entry counts."""
        if saved.kind == "sketch":
            return  # of an entry that tables on devices do not have
        columns = dict(saved.arrays)
        keys = torch.from_numpy(np.require(columns.pop("keys"), requirements=_OWN).view(np.int64)).to(self.table.device)
        if saved.kind != "rows":
            self._load_keys(saved.kind, keys, columns)
            return
        if "rows" not in columns:
            raise TableError(
                f"table '{self.spec.name}' is on a device and has rows of float32; found {sorted(columns)}"
            )
        rows = torch.from_numpy(np.require(columns.pop("rows"), requirements=_OWN))
        rows = rows if self._staging is None else self._staging.moved(rows)
        known = {
            name: torch.from_numpy(np.require(_signed(column), requirements=_OWN)) for name, column in columns.items()
        }
        self.table.put(keys, rows, {name: known[name] for name in self.table.layout.columns if name in known})
        if self.table.admission is not None:
            self.table.admission.forget_keys(keys)

    def _load_keys(self, kind: PartKind, keys: torch.Tensor, columns: Arrays) -> None:
        admission = self.table.admission
        if kind == "gone":
            self.table.remove(keys)
        elif admission is not None and kind == "candidates_gone":
            admission.forget_keys(keys)
        elif admission is not None:
            admission.load(keys, columns, int(time.time()))

    def note_loaded(self) -> int:
        self._staging = None
        return self.num_rows

    def clear(self) -> None:
        """Drop all rows, and the ids that are counted."""
        for block in self.table.rows():
            self.table.remove(block.keys)  # which moves no other row
        if self.counted is not None:
            self.counted.clear()

    def continue_from(self, token: int) -> None:
        """Note that the table has the rows of this save: the next one may be a delta."""
        self._chain.attempt = token
        self._begin_tracking(is_committed=True)  # forget what the load has changed


def _signed(column: Any) -> Any:
    return column.view(np.int32) if column.dtype == np.uint32 else column


def write_tables(
    storage: Storage, folder: str, rank: int, tables: Mapping[str, TableSaves], mode: SaveMode
) -> list[Part]:
    """Write the part files of these tables, whose saves have begun, as files of one server. The files of different
    ranks have different numbers.
    """
    with Files(storage, folder, 1, lambda text: None, rank * FILES_OF_RANK, _WRITERS) as files:
        for saves in tables.values():
            width = saves.spec.dim if mode == "inference" else saves.num_words
            if mode == "delta":
                files.put(saves.spec, "gone", saves.gone(), {})
            files.put(saves.spec, "rows", saves.live(mode), {"rows": np.empty((0, width), np.float32)})
            if saves.counted is None or mode == "inference":
                continue
            if mode == "delta":
                files.put(saves.spec, "candidates_gone", saves.counted.gone(), {})
            files.put(saves.spec, "candidates", saves.candidates(mode), {})
        return files.written()


def described_tables(tables: Mapping[str, TableSaves], with_state: bool) -> list[Table]:
    """The entries of these tables in a manifest."""
    return [described(saves.spec, with_state, saves.step, saves.num_rows, []) for saves in tables.values()]
