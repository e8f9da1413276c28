"""Lookups in tables on this process's device: the rows of a batch, and the gradients that wait for the step.

A lookup is one node of autograd's graph. Its backward leaves slots and gradients here, and `step` pushes the gradients
of all lookups of a table together. In code that torch.compile compiles, a lookup is a custom operator, so that the
graph has no break.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from torchfleet.base.errors import ModelError
from torchfleet.ps.gpu.row_blocks import RowBlock
from torchfleet.ps.worker.client.shard import Floats, Keys

_numbers = itertools.count()
_open: weakref.WeakValueDictionary[int, RowsOnDevice] = weakref.WeakValueDictionary()  # by number


class LookupTable(Protocol):
    """What lookups need from a table (implemented by DeviceTable)."""

    device: torch.device

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def find_and_gather(
        self, keys: torch.Tensor, insert: bool = ..., dtype: torch.dtype = ..., padding: int | None = ...
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def push(self, slots: torch.Tensor, grads: torch.Tensor, lr: float | torch.Tensor | None = ...) -> None: ...

    def rows(self, num_rows: int = ...) -> Iterator[RowBlock]: ...

    @property
    def num_rows(self) -> int: ...


class RowsOnDevice:
    """One table and the gradients of its rows since the last step."""

    def __init__(self, table: LookupTable) -> None:
        self.table = table
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []  # slots, gradients
        self.looked_up: list[torch.Tensor] = []  # ids, for training, since the last step
        self.anchor = torch.zeros((), device=table.device, requires_grad=True)  # ties lookups into autograd's graph
        self.trains = True  # whether the rows are trained, as compiled code sees it
        self.number = next(_numbers)
        _open[self.number] = self

    def lookup(self, ids: torch.Tensor, padding: int | None, create: bool, trains: bool) -> torch.Tensor:
        """(*ids.shape, dim). `create`: missing ids get rows; `trains`: the rows get gradients."""
        if torch.compiler.is_compiling():
            made: torch.Tensor
            made, _ = rows_of_ids(self.anchor, ids, self.number, self.table.dim, padding, create, trains)
            return made
        if create:
            self.looked_up.append(ids)
        if not (trains and torch.is_grad_enabled()):
            return self.find(ids, padding, create)[0]
        found: torch.Tensor = _Lookup.apply(self.anchor, ids, self, padding, create)  # type: ignore[no-untyped-call]
        return found

    def find(self, ids: torch.Tensor, padding: int | None, create: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, slots)."""
        slots, values = self.table.find_and_gather(ids, create, padding=padding)
        return shaped(values, (*ids.shape, self.table.dim)), slots

    def step(self, lr: float | torch.Tensor, factor: float | torch.Tensor = 1.0) -> None:
        """One update by all gradients since the last step, times `factor`."""
        self.table.push(*joined_gradients(self.take(), self.table, factor), lr)

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(slots, gradients) of all lookups since the last step. Forgets them: the next step begins."""
        pending, self.pending, self.looked_up = self.pending, [], []
        return pending

    def add(self, slots: torch.Tensor, grads: torch.Tensor) -> None:
        """Keep the gradients of a lookup for the step."""
        self.pending.append((slots, grads.reshape(-1, self.table.dim)))

    def drop(self) -> None:
        """Forget the gradients since the last step."""
        self.pending, self.looked_up = [], []

    def is_finite(self) -> bool:
        """Whether the gradients that wait are finite. Waits for the device."""
        return all(bool(torch.isfinite(grads).all()) for _, grads in self.pending)


class Rows(Protocol):
    """A table, or several of one width."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dim(self) -> int: ...


def joined_gradients(
    pending: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: Rows, factor: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, gradients times `factor`) of several lookups, one after the other."""
    if not pending:
        slots = torch.empty(0, dtype=torch.int32, device=rows.device)
        grads = torch.empty(0, rows.dim, device=rows.device)
    elif len(pending) == 1:
        slots, grads = pending[0]
    else:
        slots = torch.cat([slots for slots, _ in pending])
        grads = torch.cat([grads.float() for _, grads in pending])
    return slots, grads if isinstance(factor, float) and factor == 1.0 else grads * factor


def shaped(values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this shape in the same memory that is not a view: autograd refuses in-place changes of a view."""
    found: torch.Tensor = values.new_empty(0).set_(values.untyped_storage(), values.storage_offset(), shape)  # type: ignore[call-overload]
    return found


class _Lookup(torch.autograd.Function):
    """Values of rows; backward leaves the gradients in the table's RowsOnDevice."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, ids: torch.Tensor, rows: RowsOnDevice, padding: int | None, create: bool
    ) -> torch.Tensor:
        ctx.rows = rows
        values, ctx.slots = rows.find(ids, padding, create)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None, None]:
        ctx.rows.add(ctx.slots, grads[0])
        return None, None, None, None, None


@torch.library.custom_op("torchfleet::rows_of_ids", mutates_args=())
def rows_of_ids(
    anchor: torch.Tensor, ids: torch.Tensor, number: int, dim: int, padding: int | None, create: bool, trains: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, slots) of the table with this number, for compiled code."""
    rows = _open[number]
    if create:
        rows.looked_up.append(ids)
    return rows.find(ids, padding, create)


@rows_of_ids.register_fake
def _(anchor: Any, ids: Any, number: int, dim: int, padding: int | None, create: bool, trains: bool) -> Any:
    return anchor.new_empty(*ids.shape, dim), ids.new_empty(ids.numel(), dtype=torch.int32)


@torch.library.custom_op("torchfleet::keep_gradients", mutates_args=())
def keep_gradients(grads: torch.Tensor, slots: torch.Tensor, number: int) -> torch.Tensor:
    """Keep the gradients of a lookup for the step. Returns the gradient of the anchor."""
    _open[number].add(slots.clone(), grads.clone())  # compiled code reuses the memory of its own tensors
    return torch.zeros((), device=grads.device)


@keep_gradients.register_fake
def _(grads: Any, slots: Any, number: int) -> Any:
    return grads.new_empty(())


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, ctx.number, _, _, _, ctx.trains = inputs
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grads: torch.Tensor, _: Any) -> Any:
    found = keep_gradients(grads.contiguous(), ctx.saved_tensors[0], ctx.number) if ctx.trains else None
    return found, None, None, None, None, None, None


rows_of_ids.register_autograd(_backward, setup_context=_setup)


class JoinedTables(Protocol):
    """Several tables that are updated together (implemented by lookup/joined_tables.JoinedRows)."""

    @property
    def members(self) -> Sequence[RowsOnDevice]: ...

    def step(self, lr: float | torch.Tensor, factor: float | torch.Tensor) -> None: ...


class DeviceLookups:
    """All tables on devices of a model, by name: the engine that its embeddings are bound to."""

    def __init__(self, rows: Mapping[str, RowsOnDevice], joined: Sequence[JoinedTables] = ()) -> None:
        """`joined`: groups of these tables; a table is in at most one group."""
        self.rows = dict(rows)
        self.joined = list(joined)
        self.group_of = {member.table.name: group for group in joined for member in group.members}
        self.on_training: Callable[[], object] | None = None

    def step(self, rates: Mapping[str, float | torch.Tensor], factor: float | torch.Tensor) -> None:
        """One update of all tables by their gradients since the last step, times `factor`. `rates`: by table; the
        tables of a group have the same rate.
        """
        for group in self.joined:
            group.step(rates[group.members[0].table.name], factor)
        for name, rows in self.rows.items():
            if name not in self.group_of:
                rows.step(rates[name], factor)

    @property
    def thread_state(self) -> DeviceLookups:
        """What an embedding asks for the gradients and rows of its batch."""
        return self

    def gradient(self, table: str) -> torch.Tensor | None:
        """None: gradients of rows on devices are not in .grad."""
        return None

    def put_gradient(self, table: str, gradient: torch.Tensor | None) -> None:
        """Clear the gradients of the table."""
        assert gradient is None
        self.rows[table].drop()

    def batch_rows(self, table: str, weight: torch.Tensor) -> torch.Tensor | None:
        """As ThreadState.batch_rows: the distinct rows looked up for training since the last step."""
        rows = self.rows[table]
        if not rows.looked_up:
            return None
        ids = torch.unique(torch.cat([ids.reshape(-1) for ids in rows.looked_up]))
        return rows.lookup(ids, None, create=False, trains=weight.requires_grad)

    # As a RowSource, for state_dict()

    def walk(self, table: str) -> Iterator[tuple[Keys, Floats]]:
        """All rows of a table, in chunks."""
        found = self.rows[table].table
        for block in found.rows():
            arrays = block.arrays(found.dim)
            yield arrays["keys"], np.ascontiguousarray(arrays["rows"])

    def num_rows(self, table: str) -> int:
        return self.rows[table].table.num_rows

    def check_writable(self) -> None:
        """Raises ModelError: a state cannot be loaded into a table on a device that is already in use."""
        raise ModelError(
            "load_state_dict: tables on devices exist once fleet.distributed_optimizer was called: load the state "
            "before it, or use fleet.load"
        )
