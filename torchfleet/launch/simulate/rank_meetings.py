"""The coordinator's part of torch.distributed: it matches the operations of ranks, and keeps the keys of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from torchfleet.base.errors import FleetError
from torchfleet.base.network_links import Link
from torchfleet.base.prepared_types import prepared
from torchfleet.launch.simulate.packets import Packet, packet

Tensors = list[torch.Tensor]

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "AVG": lambda stacked: stacked.sum(0, dtype=stacked.dtype) / len(stacked),
    "PRODUCT": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "MIN": lambda stacked: stacked.min(0).values,
    "MAX": lambda stacked: stacked.max(0).values,
}


class Visit(msgspec.Struct):
    """The first frame of a request: the operation of a rank in its group. The other frames are the rank's tensors."""

    group: str
    number: int  # of the operation in its group
    operation: str
    rank: int
    size: int
    dtypes: list[str]
    reduction: str = ""
    root: int = 0

    def differs_from(self, other: Visit) -> bool:
        return (self.operation, self.size, self.reduction, self.root) != (
            other.operation, other.size, other.reduction, other.root,
        )  # fmt: skip


class Question(msgspec.Struct):
    """The only frame of a request to the store."""

    action: str  # "set", "add", "get" (answered when all keys exist), "check", "delete"
    keys: list[str]
    value: bytes = b""
    amount: int = 0


Request = Visit | Question


@dataclass
class _Meeting:
    """An operation that some ranks have entered."""

    visits: dict[int, tuple[Visit, Packet]] = field(default_factory=dict)


class MeetingPlace:
    """Collects the tensors of ranks. When the last rank has entered, it answers all after the time of the transfer."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._free_at: dict[str, float] = {}  # by group, the end of its last operation
        self._store: dict[str, bytes] = {}
        self._waiting: list[tuple[Question, Packet]] = []

    def serve(self, request: Packet) -> Iterator[Packet]:
        """Yield the answers that this request completes. Raises FleetError if ranks of a group contradict each
        other."""
        first = bytes(request.frames[0])
        if request.to[1]:
            yield from self._ask(msgspec.msgpack.decode(first, type=prepared(Question)), request)
        else:
            yield from self._visit(msgspec.msgpack.decode(first, type=prepared(Visit)), request)

    def _visit(self, visit: Visit, request: Packet) -> Iterator[Packet]:
        key = visit.group, visit.number
        meeting = self._meetings.setdefault(key, _Meeting())
        for other, _ in meeting.visits.values():
            if visit.differs_from(other):
                raise FleetError(
                    f"group {visit.group}, operation {visit.number}: rank {other.rank} calls {other.operation} "
                    f"{other.reduction}, rank {visit.rank} {visit.operation} {visit.reduction}. All ranks must make "
                    "the same calls in the same order."
                )
        meeting.visits[visit.rank] = visit, request
        if len(meeting.visits) < visit.size:
            return
        del self._meetings[key]
        visits = [meeting.visits[rank] for rank in range(visit.size)]
        brought = [_tensors(*came) for came in visits]
        results = combine(visit, brought)
        begun = max(self._free_at.get(visit.group, 0.0), *(came.time for _, came in visits))
        end = self._free_at[visit.group] = begun + self._seconds(visit, brought)
        for (_, came), result in zip(visits, results, strict=True):
            yield packet(came.sender, came.to, end, [_bytes(tensor) for tensor in result])

    def _seconds(self, visit: Visit, brought: Sequence[Tensors]) -> float:
        """Return the time of an operation: a ring if all ranks exchange data, a tree if it has one root."""
        most = max(sum(tensor.nbytes for tensor in tensors) for tensors in brought)
        link, size = self._link, visit.size
        if visit.operation == "all_reduce":
            return link.ring_seconds(most, size, passes=2)
        if visit.operation in ("reduce_scatter", "all_to_all"):
            return link.ring_seconds(most, size, passes=1)
        if visit.operation == "all_gather":
            return link.ring_seconds(most * size, size, passes=1)
        return (2 if visit.operation == "barrier" else 1) * link.tree_seconds(most, size)

    def _ask(self, question: Question, request: Packet) -> Iterator[Packet]:
        self._waiting.append((question, request))
        if question.action == "set":
            self._store[question.keys[0]] = question.value
        elif question.action == "add":
            total = int(self._store.get(question.keys[0], b"0")) + question.amount
            self._store[question.keys[0]] = str(total).encode()
        ready = [asked for asked in self._waiting if self._is_ready(asked[0])]
        self._waiting = [asked for asked in self._waiting if not self._is_ready(asked[0])]
        for asked, came in ready:
            time = max(request.time, came.time) + 2 * self._link.latency
            yield packet(came.sender, came.to, time, self._answer(asked))

    def _is_ready(self, question: Question) -> bool:
        return question.action != "get" or all(key in self._store for key in question.keys)

    def _answer(self, question: Question) -> list[bytes]:
        if question.action == "check":
            return [b"1" if all(key in self._store for key in question.keys) else b""]
        if question.action == "delete":
            return [b"1" if self._store.pop(question.keys[0], None) is not None else b""]
        return [self._store.get(key, b"") for key in question.keys]


def combine(visit: Visit, brought: Sequence[Tensors]) -> Sequence[Tensors]:
    """Return the output tensors of an operation by rank, from the input tensors by rank."""
    size, operation = visit.size, visit.operation
    if operation in ("all_reduce", "reduce"):
        everything = [_reduced(visit, same) for same in zip(*brought, strict=True)]
    else:
        everything = [tensor for tensors in brought for tensor in tensors]  # for a broadcast: the tensors of its root
    if operation == "reduce_scatter":
        return [[_reduced(visit, [tensors[rank] for tensors in brought])] for rank in range(size)]
    if operation == "all_to_all":
        return [[tensors[rank] for tensors in brought] for rank in range(size)]
    if operation == "scatter":
        return [[everything[rank]] for rank in range(size)]
    is_for_root = operation in ("reduce", "gather")
    return [everything if not is_for_root or rank == visit.root else [] for rank in range(size)]


def _reduced(visit: Visit, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len({len(tensor) for tensor in tensors}) > 1:
        raise FleetError(
            f"group {visit.group}, {visit.operation}: ranks bring tensors of {[len(tensor) for tensor in tensors]} "
            "numbers. All must be of one size."
        )
    return _REDUCTIONS[visit.reduction](torch.stack(list(tensors)))


def _tensors(visit: Visit, request: Packet) -> Tensors:
    found = zip(visit.dtypes, request.frames[1:], strict=True)
    return [
        torch.frombuffer(frame, dtype=_dtype(name)) if len(frame) else torch.empty(0, dtype=_dtype(name))
        for name, frame in found
    ]


def _dtype(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FleetError(f"expected the name of a torch dtype, found {name!r}")
    return found


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy() if len(tensor) else b""
