"""Requests to the servers that are not about rows: barriers and gathers, saves, time, statistics."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import FleetError, ServerUnreachable
from torchfleet.ps.checkpoint.manifest import Saved
from torchfleet.ps.net import addresses
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import SYNC, Array, Command, Role, pack, unpack
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.worker.client.connection import DEFAULT_WINDOW, Connection, Patience
from torchfleet.ps.worker.client.future import Future

Own = TypeVar("Own", bound="Requests")


class Joined(msgspec.Struct):
    """What a server tells a worker that joins."""

    step: int  # steps that all workers have made so far
    restarts: int  # number of earlier processes with this worker's number
    num_members: int  # workers that are members now


class Requests:
    """Connections to all servers, over `channels`, one per server, in the same order in every client.

    Every call sends one message per server, to all of them before it waits for any. At most `window` requests per
    server are in flight: a further one waits for a reply.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        *,
        names: Sequence[str] = (),
        worker: int = 0,
        role: Role = Role.FIRST_WORKER,
        patience: Patience | None = None,
        window: int = DEFAULT_WINDOW,
        process: int | None = None,
    ) -> None:
        """`process`: the number of the worker's process, if it is not this one."""
        if not channels:
            raise FleetError("a client needs at least one server")
        labels = names or [f"server {i}" for i in range(len(channels))]
        self._patience = patience or Patience()
        self._connections = [
            Connection(label, channel, worker, role, self._patience, window, process)
            for label, channel in zip(labels, channels, strict=True)
        ]
        self.num_servers = len(channels)

    @classmethod
    def connect(cls: type[Own], endpoints: Sequence[str], keys: KeyFolder | None = None, **options: Any) -> Own:
        """A client of the servers at these addresses, tcp:// or ipc:// (net/addresses.py)."""
        role = options.get("role", Role.FIRST_WORKER)
        names = [f"server {i} ({addresses.shown(endpoint)})" for i, endpoint in enumerate(endpoints)]
        channels = [addresses.connect(endpoint, keys, role, shard) for shard, endpoint in enumerate(endpoints)]
        return cls(channels, names=names, **options)

    @property
    def num_retries(self) -> int:
        return sum(connection.num_retries for connection in self._connections)

    def join(
        self, body: dict[str, Any], timeout: float | None = None, claims: Sequence[dict[str, Any]] | None = None
    ) -> list[Joined]:
        """Register this worker with the servers; returns what each tells about the job. `claims`: by server, what this
        worker was told of the job. Raises RoleError or CountedOut if a server refuses it.
        """
        arrays = [[pack(body), pack(own)] for own in claims] if claims else [[pack(body)]] * self.num_servers
        asked: Future[list[Joined]] = self._ask(
            Command.JOIN,
            arrays,
            timeout=timeout,
            finish=lambda replies: [unpack(reply[0], Joined) for reply in replies],
        )
        return asked.result()

    def tell_starting(self, workers: Sequence[int], seconds: float, timeout: float | None = None) -> None:
        """Tell the servers that these workers are being started: for so long they wait for them to join."""
        body = [pack({"workers": list(workers), "seconds": seconds})]
        self._ask(Command.STARTING, [body] * self.num_servers, timeout=timeout).result()

    def skip_step(self, servers: Collection[int], timeout: float | None = None) -> None:
        """Make these servers take one step of all workers without this worker. Returns when the step is made."""
        nothing = [Array(0, np.empty((0, 1)))]
        waits = [
            (connection, connection.submit(Command.PUSH, nothing, SYNC, True, timeout))
            for i, connection in enumerate(self._connections)
            if i in servers
        ]
        Future(waits, lambda replies: None).result()

    def barrier(self, name: str, num_workers: int, timeout: float = 600.0) -> None:
        """Wait until all workers that have not left have arrived. Server 0 keeps the list."""
        body = pack({"name": name, "num_workers": num_workers, "timeout": float(timeout)})
        first = self._connections[0]
        # The server ends the wait itself and names the missing workers; the client gives up only if the server is
        # silent.
        first.wait(first.submit(Command.BARRIER, [body], once=True, timeout=timeout + self._patience.timeout))

    def gather(
        self, name: str, round_number: int, data: bytes, num_workers: int, timeout: float, first: int = 0
    ) -> dict[int, bytes]:
        """Each worker's data, by worker, once all workers that have not left have sent theirs: `num_workers` workers
        from `first` on.
        """
        body = {"name": name, "round": round_number, "num_workers": num_workers, "timeout": float(timeout)}
        if first:  # 0 is the server's default
            body["first"] = first
        arrays = [pack(body), Array(0, np.frombuffer(data, np.uint8))]
        keeper = self._connections[0]
        reply = keeper.wait(keeper.submit(Command.GATHER, arrays, timeout=timeout + self._patience.timeout))
        return {array.number: array.data.tobytes() for array in reply}

    def enter(self, number: int, timeout: float) -> Sequence[Array]:
        """Take part in the exchange of the network from its next round on. Server 0 replies with the round, the workers
        that take part, and those of them that have the newest network; a copy of the network may follow. `number`: the
        number of this process's call; 0: only get the copy, if there is one."""
        first = self._connections[0]
        return first.wait(first.submit(Command.ENTER, [pack({"number": number})], timeout=timeout))

    def leave_network(self, made: int, copy: list[Array]) -> None:
        """Leave a copy of the network after round `made` with server 0, for workers that enter later."""
        first = self._connections[0]
        first.wait(first.submit(Command.ENTER, [pack({"number": 0, "made": made}), *copy]))

    def exchange(
        self, server: int, body: dict[str, Any], values: npt.NDArray[np.float32] | None, timeout: float
    ) -> Future[Sequence[Array]]:
        """Give one server a part of this worker's gradients; the result has the mean of all workers' parts, once all
        have come. Do not change `values` until then."""
        connection = self._connections[server]
        arrays = [pack(body)] if values is None else [pack(body), Array(0, values)]
        return Future([(connection, connection.submit(Command.EXCHANGE, arrays, timeout=timeout))], lambda r: r[0])

    def send(self, topic: str, to: int, number: int, parcel: list[Array]) -> bool:
        """Send parcel `number` (1, 2, ...) from this worker to another; False if the server has no room for it now."""
        keeper = self._connections[to % self.num_servers]
        arrays = [pack({"topic": topic, "to": to, "number": number}), *parcel]
        return bool(keeper.wait(keeper.submit(Command.SEND, arrays))[0].data[0, 0])

    def take(self, topic: str, worker: int, received: int) -> list[tuple[int, list[npt.NDArray[Any]]]]:
        """(number, arrays) of this worker's parcels after number `received`. The server may forget the parcels up to
        that number.
        """
        keeper = self._connections[worker % self.num_servers]
        reply = keeper.wait(keeper.submit(Command.TAKE, [pack({"topic": topic, "received": received})]))
        parcels, at = [], 0
        while at < len(reply):
            number, count = (int(value) for value in reply[at].data.reshape(-1)[:2])
            parcels.append((number, [array.data for array in reply[at + 1 : at + 1 + count]]))
            at += 1 + count
        return parcels

    def files(self, body: dict[str, Any]) -> tuple[str, str]:
        """One request about a shared list of files, which server 0 keeps."""
        first = self._connections[0]
        what, path = unpack(first.wait(first.submit(Command.FILES, [pack(body)]))[0], tuple[str, str])
        return what, path

    def save(
        self,
        dirname: str,
        folder: str,
        with_state: bool,
        timeout: float,
        *,
        token: int = 0,
        parent: int = 0,
        delta: bool = False,
    ) -> list[Saved]:
        """Make every server write its tables into a folder of `dirname`; returns what each has written.

        `token` identifies this save; `delta`: write only what changed since the save with the token `parent`.
        """
        body = {"dirname": dirname, "folder": folder, "with_state": with_state, "parent": parent, "delta": delta}
        replies = self._work(Command.SAVE, body, timeout, token)
        return [unpack(reply[0], Saved) for reply in replies]

    def set_clock(self, seconds: int, timeout: float = 600.0) -> dict[str, int]:
        """Set the time of all tables. Returns by table how many rows were dropped by shrinks that became due."""
        return _summed(self._work(Command.CLOCK, {"now": seconds}, timeout))

    def shrink(self, table: str, policy: Shrink, timeout: float = 600.0) -> dict[str, int]:
        """Drop rows by this policy, or by the tables' own if it is empty. Returns the number of dropped
        rows by table.
        """
        return _summed(self._work(Command.SHRINK, {"table": table, "policy": policy}, timeout))

    def inspect(self, table: str, top: int = 10, timeout: float = 600.0) -> list[dict[str, Any]]:
        """Per server: histograms and top keys of a sparse table."""
        replies = self._work(Command.INSPECT, {"table": table, "top": top}, timeout)
        return [unpack(reply[0], dict) for reply in replies]

    def stats(self) -> list[dict[str, Any]]:
        """Per server: tables with their rows and bytes, requests, errors, uptime."""
        asked: Future[list[dict[str, Any]]] = self._ask(
            Command.STATS, finish=lambda replies: [unpack(reply[0], dict) for reply in replies]
        )
        return asked.result()

    def unready(self, timeout: float) -> dict[str, str]:
        """Servers that do not serve yet, by name, with what they are doing; "" if no reply came within `timeout`
        seconds.

        Raises the server's error if it refuses this client.
        """
        asked = [(connection, connection.submit(Command.PING, [], timeout=timeout)) for connection in self._connections]
        found = {}
        for connection, call in asked:
            try:
                reply = connection.wait(call)
            except ServerUnreachable:
                found[connection.name] = ""
                continue
            if reply:
                found[connection.name] = unpack(reply[0], dict[str, str]).get("loading", "")
        return found

    def ping(self) -> None:
        self._ask(Command.PING).result()

    def stop_servers(self) -> None:
        """Stop all servers; needs the launcher's role."""
        self._ask(Command.STOP).result()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self, command: Command, body: dict[str, Any], timeout: float, token: int = 0) -> list[Sequence[Array]]:
        """Run a long command on all servers. A retry of the request is recognized by its token. If one server fails,
        the others do not receive the request after a later one: a save that began after a newer one would end the chain
        of deltas, and a clock that was set late would go back.
        """
        packed = pack({**body, "token": token or secrets.randbits(63)})
        arrays = [[packed]] * self.num_servers
        asked: Future[list[Sequence[Array]]] = self._ask(
            command, arrays, timeout=timeout, finish=lambda replies: replies
        )
        try:
            return asked.result()
        except BaseException:
            asked.give_up()
            raise

    def _ask(
        self,
        command: Command,
        arrays: Sequence[Sequence[Array]] | None = None,
        flags: int = 0,
        once: bool = False,
        timeout: float | None = None,
        finish: Callable[[list[Sequence[Array]]], Any] = lambda replies: None,
    ) -> Future[Any]:
        """One message to each server. `arrays`: by server; empty unless given."""
        by_server = arrays if arrays is not None else [[]] * self.num_servers
        waits = []
        for connection, own in zip(self._connections, by_server, strict=True):
            waits.append((connection, connection.submit(command, own, flags, once, timeout)))
        return Future(waits, finish)


def _summed(replies: list[Sequence[Array]]) -> dict[str, int]:
    """Sum the servers' counts by table."""
    total: Counter[str] = Counter()
    for reply in replies:
        total.update(unpack(reply[0], dict[str, int]))
    return dict(total)
