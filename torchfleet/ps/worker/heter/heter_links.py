"""A CPU worker's connections to the heter workers: it computes on one of them, and on another one when that is gone.

The worker chooses the heter worker with the fewest workers, asks all for their load from time to time, and moves to one
with at least two workers fewer. A request to one heter worker can be repeated at another one, so moving loses nothing.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torchfleet.base.errors import FleetError, ServerBusy, ServerRestarted, ServerUnreachable, SessionLost
from torchfleet.base.monitor.notices import tell
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import Array, Command, Role, pack, unpack
from torchfleet.ps.worker.client.connection import Connection, Patience
from torchfleet.ps.worker.heter.load_watch import LoadWatch, load_in
from torchfleet.ps.worker.heter.messages import BlockSpec, Join, Load

GONE = (ServerUnreachable, ServerRestarted, SessionLost)  # errors after which another heter worker is tried
ALIVE = Patience(timeout=4.0, retries=3)  # of small requests: a heter worker answers them while it computes
_AGAIN = 0.2  # seconds between two attempts to find a heter worker
_AVOIDED = 30.0  # seconds for which a lost heter worker is asked last: asking it may take the time of ALIVE
_TELL_EVERY = 10.0
_ANY = 1 << 62  # a worker without a heter worker joins one whatever its load


@dataclass(frozen=True)
class Place:
    """Where a heter worker listens. `is_gone`: whether no process listens there, as far as this machine can see."""

    name: str
    connect: Callable[[], Channel]
    is_gone: Callable[[], bool] = lambda: False


@dataclass
class Link:
    """A session at one heter worker. `sent`: by block, the values that it has of this worker."""

    index: int
    connection: Connection
    sent: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def ask(self, command: Command, arrays: Sequence[Array], timeout: float) -> Sequence[Array]:
        """Send a request, and wait for the reply up to `timeout` seconds while the heter worker shows signs of life."""
        return self.connection.wait(self.connection.submit(command, arrays, timeout=timeout))


class HeterLinks:
    """Chooses a heter worker, and another one when that is lost. Belongs to one thread at a time."""

    def __init__(
        self,
        places: Sequence[Place],
        specs: list[BlockSpec],
        worker: int,
        role: Role,
        start_timeout: float,
    ) -> None:
        self._places, self._specs = list(places), specs
        self._names = ", ".join(place.name for place in places)
        self._worker, self._role, self._start_timeout = worker, role, start_timeout
        self._open: dict[int, Connection] = {}
        self._lost: dict[int, float] = {}  # when a heter worker was lost, by its index
        self._link: Link | None = None
        self._watch = LoadWatch(self._connect, len(places)) if len(places) > 1 else None
        self.num_moves = -1  # the first heter worker is no move

    def current(self, may_move: bool) -> Link:
        """The link to compute on. Without one, waits for a heter worker. Raises FleetError after `start_timeout`.

        `may_move`: this worker needs no forward pass at the present heter worker any more.
        """
        if self._link is None:
            self._link = self._find()
        elif may_move and self._watch is not None:
            self._watch.check()
            self._balance(self._link, self._watch)
        return self._link

    def lose(self, link: Link, error: FleetError) -> None:
        """Close a link whose heter worker is gone, or has forgotten this worker."""
        if link is self._link:
            self._link = None
        self._close(link.index)
        if not isinstance(error, SessionLost):
            self._lost[link.index] = time.monotonic()
            tell(f"fleet: heter worker {link.index} is lost, another one goes on: {error}")

    def leave(self) -> None:
        """Tell all heter workers that this worker needs them no more, and close. Ignores those that do not answer."""
        there = [self._connection(index) for index in self._all if not self._places[index].is_gone()]
        calls = [(each, each.submit(Command.LEAVE, [], flags=1)) for each in there]
        for connection, call in calls:
            with contextlib.suppress(*GONE):
                connection.wait(call)
        self.close()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        for index in list(self._open):
            self._close(index)
        self._link = None

    @property
    def _all(self) -> range:
        return range(len(self._places))

    def _find(self) -> Link:
        started = time.monotonic()
        next_told = started + _TELL_EVERY
        while True:
            link = self._chosen()
            if link is not None:
                self.num_moves += 1
                return link
            now = time.monotonic()
            if now - started > self._start_timeout:
                raise FleetError(
                    f"no heter worker has answered for {self._start_timeout:g} s (FLEET_START_TIMEOUT): "
                    f"{self._names}. Look at their logs (heterlog.N)."
                )
            if now >= next_told:
                print(f"waiting for a heter worker of {self._names}, {now - started:.0f} s", flush=True)
                next_told = now + _TELL_EVERY
            time.sleep(_AGAIN)

    def _chosen(self) -> Link | None:
        """Join the heter worker with the fewest workers. Those lost lately are asked only if no other can be joined."""
        now = time.monotonic()
        avoided = {index for index, lost in self._lost.items() if now - lost < _AVOIDED}
        for group in ([i for i in self._all if i not in avoided], [i for i in self._all if i in avoided]):
            loads = self._loads(group)
            for index in sorted(loads, key=lambda i: (loads[i], (i - self._worker) % len(self._places))):
                link = self._join(index, _ANY)
                if link is not None:
                    for other in set(self._open) - {index}:
                        self._close(other)  # a connection must not outlive the process at its other end
                    return link
        return None

    def _balance(self, link: Link, watch: LoadWatch) -> None:
        """Move to a heter worker with at least two workers fewer than the present one, if there is one."""
        loads, watch.loads = watch.loads, {}  # each look is used once
        if link.index not in loads:
            return
        best = min(loads, key=lambda index: (loads[index], index))
        if loads[link.index] - loads[best] >= 2 and (moved := self._join(best, loads[link.index] - 2)) is not None:
            with contextlib.suppress(*GONE):
                link.connection.wait(link.connection.submit(Command.LEAVE, []))
            self._close(link.index)
            self._link, self.num_moves = moved, self.num_moves + 1

    def _loads(self, indexes: Sequence[int]) -> dict[int, int]:
        """The number of workers of each of these heter workers that answers."""
        there = [index for index in indexes if not self._places[index].is_gone()]
        asked = [(index, self._connection(index).submit(Command.STATS, [])) for index in there]
        found = {i: load_in(self._open[i], call, functools.partial(self._close, i)) for i, call in asked}
        return {index: load for index, load in found.items() if load is not None}

    def _join(self, index: int, most: int) -> Link | None:
        connection = self._connection(index)
        try:
            reply = connection.wait(connection.submit(Command.JOIN, [pack(Join(self._specs, most))]))
            if unpack(reply[0], Load).is_joined:
                return Link(index, connection)
        except (*GONE, ServerBusy):
            pass
        self._close(index)
        return None

    def _connection(self, index: int) -> Connection:
        if index not in self._open:
            self._open[index] = self._connect(index)
        return self._open[index]

    def _connect(self, index: int) -> Connection:
        place = self._places[index]
        name = f"heter worker {index} ({place.name})"
        channel = place.connect()
        return Connection(name, channel, self._worker, self._role, ALIVE, window=4, is_gone=place.is_gone)

    def _close(self, index: int) -> None:
        connection = self._open.pop(index, None)
        if connection is not None:
            connection.close()
