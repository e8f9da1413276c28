"""Parcels from worker to worker. The server keeps them, in bounded memory, until the receiver acknowledges them."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from torchfleet.ps.net.packed import pack_arrays, unpack_arrays
from torchfleet.ps.net.wire import Array
from torchfleet.ps.server.meeting.presence import MAX_NAME

MAX_BYTES = 1 << 28  # of all waiting parcels
MAX_BYTES_OF_ONE = MAX_BYTES // 2  # of one sender's waiting parcels
MAX_TAKEN = 1 << 23  # bytes of one reply, but at least one parcel
MAX_TAKEN_ARRAYS = 1 << 11  # of one reply; a message holds 4,096
MAX_KEPT, MAX_KEPT_OF_ONE = 1 << 18, 1 << 17  # waiting parcels and arrays in them: empty ones take memory, too
MAX_TOPICS = 8  # beyond it, the worker with the most topics loses its oldest, which belongs to an abandoned exchange


class SendBody(msgspec.Struct, forbid_unknown_fields=True):
    topic: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    to: int
    number: int  # 1, 2, ... from one worker to another within a topic; identifies repeats


class TakeBody(msgspec.Struct, forbid_unknown_fields=True):
    topic: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    received: int  # the last parcel that this worker has; the server may drop all up to it


@dataclass
class Box:
    """The parcels that wait for one worker."""

    parcels: deque[tuple[int, list[Array], int]] = field(default_factory=deque)  # number, arrays, sender
    next_number: int = 1


@dataclass
class Topic:
    opened_by: int  # a worker
    boxes: dict[int, Box] = field(default_factory=dict)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)  # (from, to) → the last parcel's number


class Mail:
    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._topics: OrderedDict[str, Topic] = OrderedDict()
        self.num_bytes = self.num_kept = 0
        self._sent: Counter[int] = Counter()  # bytes of waiting parcels, by sender
        self._kept: Counter[int] = Counter()  # waiting parcels and arrays in them, by sender

    def send(self, sender: int, body: SendBody, parcel: list[Array]) -> bool:
        """Keep a parcel. Returns False if there is no room. A repeat changes nothing."""
        topic = self._topic(body.topic, sender)
        way = (sender, body.to)
        if body.number <= topic.sent.get(way, 0):
            return True
        size = _size(parcel)
        if self.num_kept >= MAX_KEPT or self._kept[sender] >= MAX_KEPT_OF_ONE:
            return False
        if self.num_bytes and self.num_bytes + size > MAX_BYTES:
            return False
        if self._sent[sender] and self._sent[sender] + size > MAX_BYTES_OF_ONE:
            return False
        box = topic.boxes.setdefault(body.to, Box())
        # A frame's memory belongs to its message, so the parcel is copied.
        box.parcels.append((box.next_number, [Array(array.number, array.data.copy()) for array in parcel], sender))
        box.next_number += 1
        topic.sent[way] = body.number
        self._count(sender, parcel, 1)
        return True

    def take(self, worker: int, body: TakeBody) -> list[tuple[int, list[Array]]]:
        """The next parcels after number `received`, up to a limit. Repeats return the same until acknowledged."""
        box = self._topic(body.topic, worker).boxes.setdefault(worker, Box())
        while box.parcels and box.parcels[0][0] <= body.received:
            _, parcel, sender = box.parcels.popleft()
            self._count(sender, parcel, -1)
        taken: list[tuple[int, list[Array]]] = []
        size = num_arrays = 0
        for number, parcel, _ in box.parcels:
            size += _size(parcel)
            num_arrays += 1 + len(parcel)
            if taken and (size > MAX_TAKEN or num_arrays > MAX_TAKEN_ARRAYS):
                break
            taken.append((number, parcel))
        return taken

    def export(self) -> list[Any]:
        """The state as plain values."""
        return [
            [
                name,
                topic.opened_by,
                [[to, n] for to, n in topic.sent.items()],
                {to: [box.next_number, _packed(box)] for to, box in topic.boxes.items()},
            ]
            for name, topic in self._topics.items()
        ]

    def restore(self, kept: list[Any]) -> None:
        """Restore the state from the result of `export`."""
        self._begin()
        for name, opened_by, sent, boxes in kept:
            topic = self._topics[name] = Topic(opened_by, sent={(way[0], way[1]): n for way, n in sent})
            for to, (next_number, parcels) in boxes.items():
                box = topic.boxes[to] = Box(next_number=next_number)
                for number, arrays, sender in parcels:
                    box.parcels.append((number, unpack_arrays(arrays), sender))
                    self._count(sender, box.parcels[-1][1], 1)

    def _count(self, sender: int, parcel: list[Array], sign: int) -> None:
        num_bytes, num_kept = sign * _size(parcel), sign * (1 + len(parcel))
        self.num_bytes += num_bytes
        self.num_kept += num_kept
        self._sent[sender] += num_bytes
        self._kept[sender] += num_kept

    def _topic(self, name: str, worker: int) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = Topic(worker)
            if len(self._topics) > MAX_TOPICS:
                self._drop_one()
        return topic

    def _drop_one(self) -> None:
        ((most, _),) = Counter(topic.opened_by for topic in self._topics.values()).most_common(1)
        oldest = next(name for name, topic in self._topics.items() if topic.opened_by == most)
        for box in self._topics.pop(oldest).boxes.values():
            for _, parcel, sender in box.parcels:
                self._count(sender, parcel, -1)


def _packed(box: Box) -> list[Any]:
    return [[number, pack_arrays(parcel), sender] for number, parcel, sender in box.parcels]


def _size(parcel: list[Array]) -> int:
    return sum(array.data.nbytes for array in parcel)
