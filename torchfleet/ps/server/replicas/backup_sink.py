"""Sends entries to a backup. They are numbered, kept until they are confirmed, and sent again without progress."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

from torchfleet.base.errors import WireError
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import Command, Frame, Message, Role, decode
from torchfleet.ps.server.replicas.between import Identity, append

_RESEND = 1.0  # seconds without progress after which all that is not confirmed is sent again
_ALL = 1 << 62  # an index above every other


class BackupSink:
    """As Sink. Owns `channel`, over which the backup confirms."""

    def __init__(self, channel: Channel, own: Identity, session: int, index: int) -> None:
        """`session`: the backup's incarnation. `index`: of the last entry, which the first piece of the state has."""
        self._channel, self._own, self._session = channel, own, session
        self._kept: deque[tuple[int, int, list[Frame]]] = deque()  # number, index and frames of what is not confirmed
        self._num_sent = 0  # of these
        self._next, self._confirmed = 1, index
        self._progress = channel.now()
        self.term = 0
        self.is_counted = False  # False until it has the whole state: replies do not wait for it
        self._is_open = (
            False  # the backup has heard something small: it would end a new connection that begins with much
        )
        self.flags = 0  # of signs of life

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        """As Sink.append."""
        if not self._kept:
            self._progress = self._channel.now()
        frames = append(self._own, self.term, self._session, self._next, self._channel.now(), entry)
        self._kept.append((self._next, index, frames))
        self._next += 1
        self._flush()

    def flush(self) -> None:
        """As Sink.flush: nothing is put off."""

    def confirmed(self) -> int:
        """As Sink.confirmed."""
        return self._confirmed if self.is_counted else _ALL

    def trouble(self) -> str:
        """As Sink.trouble. A backup that is away is dropped from the view; replies then do not wait for it."""
        return ""

    def close(self) -> None:
        """As Sink.close."""
        self._channel.close()

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes: there is something to hear."""
        return self._channel.wakes()

    def hear(self) -> Message | None:
        """What the backup confirms; None if it has said nothing new."""
        while (frames := self._channel.receive(0)) is not None:
            with contextlib.suppress(WireError):  # what another process at its address may have to say
                message = decode(frames)
                if (message.command, message.role, message.shard) == (Command.CONFIRM, Role.SERVER, self._own.shard):
                    return message
        return None

    @property
    def last_number(self) -> int:
        """Of the messages so far."""
        return self._next - 1

    @property
    def confirmed_number(self) -> int:
        """Up to which the backup has all."""
        return self._kept[0][0] - 1 if self._kept else self._next - 1

    @property
    def num_waiting(self) -> int:
        """Messages that are not confirmed."""
        return len(self._kept)

    def confirm(self, number: int) -> None:
        """The backup has all up to this one."""
        self._is_open = True
        while self._kept and self._kept[0][0] <= number:
            _, self._confirmed, _ = self._kept.popleft()
            self._num_sent = max(0, self._num_sent - 1)
            self._progress = self._channel.now()
        self._flush()

    def beat(self) -> None:
        """A sign of life; what was lost on the way goes again."""
        now = self._channel.now()
        if self._kept and now - self._progress > _RESEND:
            self._num_sent, self._progress, self._is_open = 0, now, False
        self._flush()
        self._channel.send(append(self._own, self.term, self._session, 0, now, (), self.flags))

    def _flush(self) -> None:
        while self._is_open and self._num_sent < len(self._kept) and self._channel.send(self._kept[self._num_sent][2]):
            self._num_sent += 1
