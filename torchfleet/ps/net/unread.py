"""Counts the bytes of unread replies per client, so that no client can fill the server's memory."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq

from torchfleet.ps.net.wire import Frame

MAX_UNREAD = 1 << 27  # bytes for one client; a single reply may be larger if no other reply waits for the client
MAX_UNREAD_IN_ALL = 1 << 32
COUNTED = 1 << 16  # bytes; smaller messages are not counted, because the queues' lengths bound them


class Unread:
    """The bytes that ZeroMQ holds, by peer. A message counts until ZeroMQ has passed its last large frame to the
    kernel."""

    def __init__(self) -> None:
        self._bytes: dict[bytes, int] = {}
        self._sent: deque[tuple[bytes, int]] = deque()  # filled by the thread that frees frames
        self._num_bytes = 0
        self._full: set[bytes] = set()  # peers that hit the limit; removed when at most half of it is in use

    def refusal(self, peer: bytes, num_bytes: int = 0) -> str:
        """The reason why a reply of `num_bytes` may not be queued for this peer now; "" if it may."""
        self._settle()
        held = self._bytes.get(peer, 0)
        if held and (held + num_bytes > MAX_UNREAD or peer in self._full):
            self._full.add(peer)
            return f"{held:,} bytes of replies wait to be read by this client, at most {MAX_UNREAD:,}: read them first"
        if held and self._num_bytes + num_bytes > MAX_UNREAD_IN_ALL:
            return f"{self._num_bytes:,} bytes of replies wait to be read by all clients, at most {MAX_UNREAD_IN_ALL:,}"
        return ""

    def count(self, peer: bytes, frames: list[Frame], num_bytes: int) -> list[Frame]:
        """Count a message from now on. Returns the frames to send in place of `frames`."""
        index = _last(frames)
        data = frames[index]
        watched = data.view() if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        weakref.finalize(watched, self._sent.append, (peer, num_bytes)).atexit = False
        self._bytes[peer] = self._bytes.get(peer, 0) + num_bytes
        self._num_bytes += num_bytes
        # copy_threshold=0: if ZeroMQ copied the frame, its release would not show when it was sent.
        return [*frames[:index], zmq.Frame(watched, copy_threshold=0), *frames[index + 1 :]]

    def _settle(self) -> None:
        while self._sent:
            peer, num_bytes = self._sent.popleft()
            self._num_bytes -= num_bytes
            left = self._bytes[peer] - num_bytes
            if left <= MAX_UNREAD // 2:
                self._full.discard(peer)
            if left:
                self._bytes[peer] = left
            else:
                del self._bytes[peer]


def _last(frames: list[Frame]) -> int:
    """The index of the frame to watch: the last large frame if little follows it, else the last that is not empty."""
    behind = 0
    for index in range(len(frames) - 1, -1, -1):
        size = _size(frames[index])
        if size >= COUNTED:
            return index
        behind += size
        if behind >= COUNTED:
            break
    return max(i for i, frame in enumerate(frames) if _size(frame))


def size_of(frames: Sequence[Frame]) -> int:
    """Bytes of a message."""
    num_bytes = 0
    for frame in frames:
        num_bytes += frame.nbytes if isinstance(frame, np.ndarray) else len(frame)
    return num_bytes


def _size(frame: Any) -> int:
    return int(frame.nbytes) if isinstance(frame, np.ndarray) else len(frame)
