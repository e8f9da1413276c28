"""Copies a server's state in pieces: first all but the rows, then the rows in many pieces, while the server serves.

The first piece is the state at one index. Each later piece has rows as they are when it is made, at a later index. A
server that applies pieces and entries in the order in which they were made reaches the same state. If an entry changes
a row that has not arrived yet, it makes a temporary row, which the row's piece overwrites later. The entries contain
the decisions that depended on rows, so nothing else depends on rows that have not arrived.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from torchfleet.base.errors import FleetError, LogError
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.net.packed import pack_answer, pack_request, unpack_answer, unpack_request
from torchfleet.ps.net.wire import MAX_BODY, Command, Frame, unpack
from torchfleet.ps.server.arrays import only
from torchfleet.ps.server.long_work import ShrinkBody, chosen_tables, guarded, shrink_due, shrink_in_slices
from torchfleet.ps.server.saves.table_saving import SaveBody, save_in_slices
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.state.claims import Agreement
from torchfleet.ps.server.state.state import State
from torchfleet.ps.server.state.work_queue import LongRequest
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.tables.table import OneSlice, PartKind, SavedSlice

SLICE = 1 << 14  # rows in one piece
MAX_PART = 1 << 28  # bytes; a larger piece is given in parts: a message between servers holds a gigabyte
_DTYPES = {"|u1", "|i1", "<u2", "<f2", "<u4", "<u8", "<f4"}

Piece = Sequence[Frame]


class PieceHead(msgspec.Struct, array_like=True):
    """The first frame of a piece. The other frames are the StateBody of a piece "state", or the arrays of a piece
    "rows". If the piece is large, its other frames come before it, as bytes in pieces "part"."""

    copy: int  # number of the copy that the piece belongs to
    what: str  # "part", "state", "rows" or "end"
    table: int = 0
    kind: PartKind = "rows"
    start: int = 0
    arrays: list[tuple[str, str, list[int]]] = []  # name, dtype, shape
    lengths: list[int] = []  # bytes of each frame that came in parts


class StateBody(msgspec.Struct):
    """The state of a server except the rows of its tables."""

    incarnation: int
    tables: list[tuple[TableSpec, dict[str, Any]]]
    num_workers: int
    min_workers: int
    on_worker_loss: str
    members: dict[str, Any]
    sessions: list[Any]
    barriers: dict[str, Any]
    gatherings: dict[str, Any]
    mail: list[Any]
    files: dict[str, Any]
    presence: dict[str, Any]
    changes: list[Any]
    bound: dict[str, Any]
    sync_step: dict[int, Any]
    num_steps: int
    gathered: list[Any]
    long_requests: dict[int, Any]  # request, answer, tables to shrink, rows dropped by table
    chain: tuple[int, int]
    clock: int | None
    schedule: dict[int, int]
    num_dropped: int
    model: str
    agreement: Agreement | None = None
    rounds: dict[str, Any] | None = None
    entrance: dict[str, Any] | None = None
    quorum: dict[str, Any] | None = None


def export_state(server: Server, copy: int) -> Iterator[list[Frame]]:
    """Yield the pieces of a copy. The caller takes the first at once, the others at any time. `copy`: its number."""
    tables = list(server.state.tables.values())
    yield [msgspec.msgpack.encode(PieceHead(copy, "state")), msgspec.msgpack.encode(_body(server))]
    for table in tables:
        num_rows = max(1, min(SLICE, MAX_PART // (4 * table.spec.stored_words)))
        for saved in table.save_slices("copy", num_rows):
            arrays = {name: np.ascontiguousarray(array) for name, array in saved.arrays.items()}
            named = [(name, array.dtype.str, list(array.shape)) for name, array in arrays.items()]
            head = PieceHead(copy, "rows", table.spec.number, saved.kind, saved.start, named)
            yield [msgspec.msgpack.encode(head), *arrays.values()]
    yield [msgspec.msgpack.encode(PieceHead(copy, "end"))]


def in_parts(piece: Piece) -> list[Piece]:
    """Split a piece that is larger than MAX_PART. The destination must get all parts with no entry in between."""
    frames = [memoryview(frame) for frame in piece[1:]]
    if sum(frame.nbytes for frame in frames) <= MAX_PART:
        return [piece]
    head = msgspec.msgpack.decode(piece[0], type=prepared(PieceHead))
    part = msgspec.msgpack.encode(PieceHead(head.copy, "part"))
    views = [frame.cast("B") for frame in frames if frame.nbytes]
    parts: list[Piece] = [[part, view[at : at + MAX_PART]] for view in views for at in range(0, len(view), MAX_PART)]
    head.lengths = [frame.nbytes for frame in frames]
    return [*parts, [msgspec.msgpack.encode(head)]]


def import_state(server: Server, pieces: Iterable[Piece]) -> None:
    """Apply all pieces of one copy to a server that has no state yet. Raises LogError if the last is missing."""
    taken = StateImport(server)
    for piece in pieces:
        taken.take(piece)
    if not taken.is_complete:
        raise LogError("expected all pieces of a server's state, and the last is missing")


def _body(server: Server) -> StateBody:
    state = server.state
    kept = {
        token: [pack_request(long.request), pack_answer(long.result), *_progress(long)]
        for token, long in state.work.requests.items()
        if long.request.message.command != Command.INSPECT
    }
    return StateBody(
        server.incarnation,
        [(table.spec, table.export_notes()) for table in state.tables.values()],
        state.num_workers,
        state.meetings.members.min_workers,
        state.meetings.members.on_loss,
        state.meetings.members.export(),
        state.sessions.export(),
        state.meetings.barriers.export(),
        state.meetings.gatherings.export(),
        state.meetings.mail.export(),
        state.meetings.files.export(),
        state.meetings.presence.export(),
        state.pushes.changes.export(),
        state.pushes.bound.export(),
        {worker: pack_request(request) for worker, request in state.pushes.step.items()},
        state.pushes.num_steps,
        [pack_request(request) for request in state.pushes.gathered],
        kept,
        (state.saves.chain.attempt, state.saves.chain.base),
        state.clock.given,
        state.work.schedule.export(),
        state.pushes.num_dropped,
        state.saves.model,
        state.meetings.agreement,
        state.meetings.rounds.export(),
        state.meetings.entrance.export(),
        state.meetings.quorum.export(),
    )


def _progress(long: LongRequest) -> tuple[list[int], dict[str, int]]:
    """The numbers of the tables to shrink, and the rows dropped so far by table; both empty if there is a result."""
    if long.result is not None:
        return [], {}
    return long.due, {name: num for name, num in long.dropped.items() if num}


class StateImport:
    """Applies the pieces of one copy to a server. Entries may be applied between them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._notes: dict[int, dict[str, Any]] = {}
        self._parts = bytearray()  # of the next piece
        self.copy: int | None = None  # the number of the copy; None: no piece was applied yet
        self.is_complete = False

    def take(self, piece: Piece) -> None:
        """Apply a piece. Pieces of other copies are ignored, because entries have already made the same state here.
        Raises LogError if the first piece is not "state", or a piece is malformed."""
        try:
            head = msgspec.msgpack.decode(memoryview(piece[0]), type=prepared(PieceHead))
            if self.copy in (None, head.copy) and head.what == "part":
                self._parts += memoryview(piece[1]).cast("B")
                return
            piece = self._with_parts(head, piece)
            if self.copy is None and head.what == "state":
                self._take_state(head, msgspec.msgpack.decode(memoryview(piece[1]), type=prepared(StateBody)))
            elif head.copy == self.copy and head.what == "rows":
                self._take_rows(head, piece[1:])
            elif head.copy == self.copy and head.what == "end":
                self._end()
            elif self.copy is None:
                raise LogError(f"expected the first piece of a server's state, found '{head.what}'")
        except LogError:
            raise
        except (FleetError, msgspec.MsgspecError, ValueError, KeyError, TypeError, IndexError) as error:
            raise LogError(
                f"a piece of a server's state cannot be taken in: {type(error).__name__}: {error}"
            ) from error

    def check_begun(self) -> None:
        """Raise LogError if no piece was applied yet, so that there is no state for an entry to change."""
        if self.copy is None:
            raise LogError("expected the first piece of a server's state, found an entry")

    def _with_parts(self, head: PieceHead, piece: Piece) -> Piece:
        """The piece, with the frames that came in parts. Raises LogError if they are not as long as announced."""
        if not head.lengths or self.copy not in (None, head.copy):
            return piece
        parts, self._parts = memoryview(bytes(self._parts)), bytearray()
        if sum(head.lengths) != len(parts) or min(head.lengths) < 0:
            raise LogError(f"expected parts of {sum(head.lengths):,} bytes, found {len(parts):,}")
        ends = list(itertools.accumulate(head.lengths))
        return [piece[0], *(parts[end - length : end] for end, length in zip(ends, head.lengths, strict=True))]

    def _take_state(self, head: PieceHead, body: StateBody) -> None:
        server, state = self._server, self._server.state
        kept = body.num_workers, body.min_workers, body.on_worker_loss
        own = state.num_workers, state.meetings.members.min_workers, state.meetings.members.on_loss
        if kept != own:
            raise LogError(
                f"the state is that of a server for {_described(*kept)}, and this one is for {_described(*own)}: go on "
                "with the same, or start without the log"
            )
        state.has_moved = True
        for spec, notes in body.tables:
            state.add_table(spec)
            state.tables[spec.number].restore_notes(notes)
            self._notes[spec.number] = notes
        server.incarnation, self.copy = body.incarnation, head.copy
        state.meetings.members.restore(body.members)
        state.is_stopping = state.meetings.members.is_over(state.num_workers)  # the last worker left before the copy
        state.sessions.restore(body.sessions)
        state.meetings.barriers.restore(body.barriers)
        state.meetings.gatherings.restore(body.gatherings)
        state.meetings.mail.restore(body.mail)
        state.meetings.files.restore(body.files)
        state.meetings.presence.restore(body.presence)
        state.pushes.changes.restore(body.changes)
        state.pushes.bound.restore(body.bound)
        state.work.schedule.restore(body.schedule)
        state.pushes.step = {worker: unpack_request(request) for worker, request in body.sync_step.items()}
        state.pushes.num_steps = body.num_steps
        state.pushes.gathered = [unpack_request(request) for request in body.gathered]
        state.saves.chain.attempt, state.saves.chain.base = body.chain
        if body.clock is not None:
            state.clock.set(body.clock)
        state.pushes.num_dropped, state.saves.model = body.num_dropped, body.model
        state.meetings.agreement = body.agreement
        if body.rounds is not None and body.entrance is not None:
            state.meetings.rounds.restore(body.rounds)
            state.meetings.entrance.restore(body.entrance)
        if body.quorum is not None:
            state.meetings.quorum.restore(body.quorum)
        self._take_long(body)

    def _take_long(self, body: StateBody) -> None:
        """Restore the long requests. Begin those anew that the other server had not finished."""
        for token, (request, answer, due, dropped) in body.long_requests.items():
            long = LongRequest(unpack_request(request), unpack_answer(answer), due=list(due), dropped=dict(dropped))
            _resume(self._server.state, token, long)

    def _take_rows(self, head: PieceHead, frames: Sequence[Frame]) -> None:
        table = self._server.state.tables[head.table]
        arrays: dict[str, Any] = {}
        for (name, dtype, shape), frame in zip(head.arrays, frames, strict=True):
            if dtype not in _DTYPES:
                raise LogError(f"expected arrays of {sorted(_DTYPES)}, found {dtype!r}")
            arrays[name] = np.frombuffer(frame, np.dtype(dtype)).reshape(shape)
        step = table.step
        table.restore(OneSlice(SavedSlice(head.kind, arrays, head.start)))
        table.step = step

    def _end(self) -> None:
        for number, notes in self._notes.items():
            self._server.state.tables[number].end_copy(notes)
        self.is_complete = True


def _resume(state: State, token: int, long: LongRequest) -> None:
    """Register a long request, and queue its work if it has no result. Raises FleetError if it is malformed."""
    state.work.requests[token] = long
    if long.result is not None:
        return
    request = long.request
    if request.message.command == Command.SAVE:
        work = save_in_slices(state, long, unpack(only(request), SaveBody, MAX_BODY))
    elif request.message.command == Command.SHRINK:
        chosen = chosen_tables(state, unpack(only(request), ShrinkBody, MAX_BODY))
        work = shrink_in_slices(state, long, chosen)
    else:
        work = shrink_due(state, long, long.due)
    long.work = guarded(state, long, work)
    state.work.slices.append(long.work)


def _described(num_workers: int, min_workers: int, on_loss: str) -> str:
    least = f"{min_workers} to " if min_workers else ""
    return f"{least}{num_workers} workers (on_worker_loss={on_loss})"
