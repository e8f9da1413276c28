"""Parcels from worker to worker: kept until they are taken, within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec

from torchfleet.net.wire import Array

MAX_BYTES = 1 << 28  # of all parcels that wait
MAX_TAKEN = 1 << 23  # bytes of one reply, but at least one parcel
MAX_TAKEN_ARRAYS = 1 << 11  # of one reply; a message holds 4,096
MAX_PARCELS = 1 << 16  # that wait: an empty one takes memory, too
MAX_TOPICS = 8  # the oldest is dropped: it belongs to an exchange that was given up


class SendBody(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    to: int
    number: int  # 1, 2, ... from one worker to another within a topic: a repeat is recognised by it


class TakeBody(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    received: int  # the last parcel that this worker has; it and those before it can be forgotten


@dataclass
class Box:
    """What waits for one worker."""

    parcels: deque[tuple[int, list[Array]]] = field(default_factory=deque)
    next_number: int = 1


@dataclass
class Topic:
    boxes: dict[int, Box] = field(default_factory=dict)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)  # (from, to) → the last parcel's number

    @property
    def num_bytes(self) -> int:
        return sum(_size(parcel) for box in self.boxes.values() for _, parcel in box.parcels)


class Mail:
    def __init__(self) -> None:
        self._topics: OrderedDict[str, Topic] = OrderedDict()
        self.num_bytes = self.num_parcels = 0

    def send(self, sender: int, body: SendBody, parcel: list[Array]) -> bool:
        """Whether there was room for it. Sending again what is here already changes nothing."""
        topic = self._topic(body.topic)
        way = (sender, body.to)
        if body.number <= topic.sent.get(way, 0):
            return True
        size = _size(parcel)
        if self.num_parcels >= MAX_PARCELS or (self.num_bytes and self.num_bytes + size > MAX_BYTES):
            return False
        box = topic.boxes.setdefault(body.to, Box())
        # A frame's memory belongs to the message it came in; the copy is ours for as long as it waits.
        box.parcels.append((box.next_number, [Array(array.number, array.data.copy()) for array in parcel]))
        box.next_number += 1
        topic.sent[way] = body.number
        self.num_bytes += size
        self.num_parcels += 1
        return True

    def take(self, worker: int, body: TakeBody) -> list[tuple[int, list[Array]]]:
        """Parcels after number `received`, some of them; again the same until they are acknowledged."""
        box = self._topic(body.topic).boxes.setdefault(worker, Box())
        while box.parcels and box.parcels[0][0] <= body.received:
            self.num_bytes -= _size(box.parcels.popleft()[1])
            self.num_parcels -= 1
        taken: list[tuple[int, list[Array]]] = []
        size = num_arrays = 0
        for number, parcel in box.parcels:
            size += _size(parcel)
            num_arrays += 1 + len(parcel)
            if taken and (size > MAX_TAKEN or num_arrays > MAX_TAKEN_ARRAYS):
                break
            taken.append((number, parcel))
        return taken

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = Topic()
            if len(self._topics) > MAX_TOPICS:
                _, dropped = self._topics.popitem(last=False)
                self.num_bytes -= dropped.num_bytes
                self.num_parcels -= sum(len(box.parcels) for box in dropped.boxes.values())
        return topic


def _size(parcel: list[Array]) -> int:
    return sum(array.data.nbytes for array in parcel)
