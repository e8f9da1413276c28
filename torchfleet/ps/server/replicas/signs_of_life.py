"""Signs of life that a primary sends from a thread of its own.

The server's loop sends some too, between two requests. On a busy machine a loop that computes waits for a core again
and again, and a long request holds it up. A thread that sleeps most of the time gets a core at once. Its messages say
that the process runs and that its loop has turned lately. A process that is stopped or dead sends no message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchfleet.base.background import BackgroundThreads
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.replicas.between import confirm_in, seconds
from torchfleet.ps.server.replicas.pace import BEAT, GIVE_UP, LEASE


class SignsOfLife:
    """Sends a sign of life every BEAT seconds, and reads the answers, until it is closed."""

    def __init__(
        self,
        connect: Callable[[], Channel],
        make: Callable[[float], list[Frame]],
        shard: int,
        session: int,
        now: float,
    ) -> None:
        """`connect`: a channel to the backup, which the thread owns. `make(now)`: a sign of life. `session`: the
        backup's incarnation. `now`: the time, on the clock of the channel."""
        self._connect, self._make, self._shard, self._session = connect, make, shard, session
        self._turned = now  # when the server's loop turned last
        self._num_answers = self._num_taken = 0
        self.lease = 0.0  # until then the backup cannot take over
        self._over = threading.Event()
        self._thread = BackgroundThreads([self._run])
        self._thread.start()

    def turn(self, now: float) -> bool:
        """The server's loop turns. Returns whether the backup has answered since the last call."""
        self._turned, answers = now, self._num_answers
        is_news, self._num_taken = answers > self._num_taken, answers
        return is_news

    def close(self, wait: bool = False) -> None:
        """End the thread. `wait`: until it has ended, which may take BEAT seconds."""
        self._over.set()
        if wait:
            self._thread.join()

    def _run(self) -> None:
        channel = self._connect()
        try:
            while not self._over.is_set():
                now = channel.now()
                if now - self._turned < GIVE_UP:
                    channel.send(self._make(now))
                self._hear(channel, now + BEAT)
        finally:
            channel.close()

    def _hear(self, channel: Channel, until: float) -> None:
        while (left := until - channel.now()) > 0 and not self._over.is_set():
            frames = channel.receive(left)
            message = None if frames is None else confirm_in(frames, self._shard)
            if message is not None and message.client == self._session:
                self.lease = max(self.lease, seconds(message.sequence) + LEASE)
                self._num_answers += 1
