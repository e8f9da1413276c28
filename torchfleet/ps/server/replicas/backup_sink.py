"""Sends numbered entries to a backup, keeps them until they are confirmed, and repeats them if confirmations stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.unread import size_of
from torchfleet.ps.net.wire import Frame, Message
from torchfleet.ps.server.log.log_writer import MAX_BEHIND
from torchfleet.ps.server.replicas.between import Identity, append, confirm_in

_RESEND = 1.0  # seconds without a confirmation after which all unconfirmed messages are sent again
_ALL = 1 << 62  # an index above that of every entry


class BackupSink:
    """As Sink. Owns `channel`, over which it sends entries and receives confirmations."""

    def __init__(self, channel: Channel, own: Identity, session: int, index: int) -> None:
        """`session`: the backup's incarnation. `index`: that of the last entry and of the first piece of the state."""
        self._channel, self._own, self._session = channel, own, session
        # Unconfirmed messages: number, index, frames, and bytes of the entry (0 for a piece of the state).
        self._kept: deque[tuple[int, int, list[Frame], int]] = deque()
        self._num_bytes = 0  # of these
        self._num_sent = 0  # how many of these are sent
        self._next, self._confirmed = 1, index
        self._progress = channel.now()
        self.term = 0
        self.is_counted = False  # whether replies wait for this sink: once the backup has the whole state
        # Whether the backup has answered on this connection: it closes one whose first message is large.
        self._is_open = False
        self.is_stuck = False  # the backup has said that its log cannot be written now
        self.flags = 0  # flags of the signs of life

    def append(self, index: int, entry: Sequence[Frame]) -> None:
        """As Sink.append."""
        self._append(index, entry, size_of(entry))

    def append_piece(self, index: int, piece: Sequence[Frame]) -> None:
        """As `append`, for a piece of the state: the caller sends few of them at a time."""
        self._append(index, piece, 0)

    def _append(self, index: int, entry: Sequence[Frame], num_bytes: int) -> None:
        now = self._channel.now()
        if not self._kept:
            self._progress = now
        frames = append(self._own, self.term, self._session, self._next, now, entry)
        self._kept.append((self._next, index, frames, num_bytes))
        self._num_bytes += num_bytes
        self._next += 1
        self._flush()

    def flush(self, after: float = 0.0) -> None:
        """As Sink.flush: `append` postpones nothing for batching."""

    def confirmed(self) -> int:
        """As Sink.confirmed. Above every index while replies do not wait for this sink."""
        return self._confirmed if self.is_counted else _ALL

    def trouble(self) -> str:
        """As Sink.trouble. The primary removes a silent backup from the view, and this sink; also one that cannot
        write its log while it is being filled (`is_hopeless`)."""
        if self.is_counted and self.is_stuck:
            return "The log of the backup cannot be written, and changes that are not in it cannot be promised."
        return f"The backup is {self._num_bytes:,} bytes behind." if self._num_bytes > MAX_BEHIND else ""

    @property
    def is_hopeless(self) -> bool:
        """Whether a backup that is being filled cannot write its log. Changes do not wait for it."""
        return self.is_stuck and not self.is_counted

    def close(self) -> None:
        """As Sink.close. Messages that are not sent yet are dropped."""
        self._channel.close()

    def wakes(self) -> tuple[object, ...]:
        """As Handler.wakes: readable when `hear` may return a message."""
        return self._channel.wakes()

    def hear(self) -> Message | None:
        """The next CONFIRM of this shard; None if none has arrived. Does not block, and drops other messages."""
        while (frames := self._channel.receive(0)) is not None:
            if (message := confirm_in(frames, self._own.shard)) is not None:
                return message
        return None

    @property
    def last_number(self) -> int:
        """The number of the last appended message."""
        return self._next - 1

    @property
    def confirmed_number(self) -> int:
        """The highest number up to which the backup has confirmed all messages."""
        return self._kept[0][0] - 1 if self._kept else self._next - 1

    @property
    def num_waiting(self) -> int:
        """How many messages are not confirmed."""
        return len(self._kept)

    def confirm(self, number: int) -> None:
        """Drop the messages up to `number`, which the backup has confirmed, and send the next ones."""
        self._is_open, num_before = True, len(self._kept)
        while self._kept and self._kept[0][0] <= number:
            _, self._confirmed, _, num_bytes = self._kept.popleft()
            self._num_bytes -= num_bytes
            self._num_sent = max(0, self._num_sent - 1)
        if len(self._kept) < num_before:
            self._progress = self._channel.now()
        self._flush()

    def beat(self) -> None:
        """Send a sign of life. After _RESEND seconds without progress, repeat all messages at the next answer."""
        now = self._channel.now()
        if self._kept and now - self._progress > _RESEND:
            self._num_sent, self._progress, self._is_open = 0, now, False
        self._flush()
        self._channel.send(self.sign(now))

    def sign(self, now: float) -> list[Frame]:
        """A sign of life. Any thread may call it."""
        return append(self._own, self.term, self._session, 0, now, (), self.flags)

    def _flush(self) -> None:
        while self._is_open and self._num_sent < len(self._kept) and self._channel.send(self._kept[self._num_sent][2]):
            self._num_sent += 1
