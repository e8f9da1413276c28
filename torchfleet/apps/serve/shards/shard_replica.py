"""One read-only server of a shard of rows, as a model server sees it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import FleetError, ServerUnreachable
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.wire import Role
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

PROBE_PAUSE = 1.0  # seconds between two attempts to reach a server that is lost
_MEASURED = 512  # latencies from which the percentile is computed
_FIRST_P95 = 0.02  # seconds, until there are enough measurements
_ENOUGH = 32


@dataclass(frozen=True)
class ServedShard:
    """What a server must serve to be a replica of a shard, as its reply to STATS says."""

    save: str
    token: int
    shard: int
    num_shards: int


@dataclass(frozen=True)
class ServedSave:
    """The save whose rows a server has loaded."""

    save: str
    token: int
    time: float = 0.0  # of its link in the chain


def served_save(endpoints: Sequence[str], keys: KeyFolder | None, timeout: float) -> ServedSave:
    """The save of the first of these servers that answers. Raises the last server's FleetError if no server answers."""
    for endpoint in endpoints:
        try:
            client = Client.connect([endpoint], keys, role=Role.WORKER, patience=Patience(timeout, retries=1))
        except FleetError:
            if endpoint == endpoints[-1]:
                raise
            continue
        with contextlib.closing(client):
            try:
                served = client.stats()[0].get("served")
            except FleetError:
                if endpoint == endpoints[-1]:
                    raise
                continue
        try:
            return msgspec.convert(served, prepared(ServedSave))
        except msgspec.ValidationError:
            raise FleetError(
                f"{endpoint}: expected a read-only server, found another one. Start it with `python -m "
                "torchfleet.server --read_only MODEL --shard K/N`."
            ) from None
    raise FleetError("expected the address of a server")


class ShardReplica:
    """Reads rows from one server in a thread of its own, which owns the connection.

    A server that gives no answer, or a wrong one, is lost: reads fail at once until a probe finds it again.
    """

    def __init__(
        self, endpoint: str, expected: ServedShard, specs: list[TableSpec], keys: KeyFolder | None, timeout: float
    ) -> None:
        self.endpoint, self._expected, self._specs, self._key_folder = endpoint, expected, specs, keys
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"shard {expected.shard}")
        self._client: Client | None = None
        self._latencies: deque[float] = deque(maxlen=_MEASURED)
        self._p95 = _FIRST_P95
        self._asked_at: float | None = None  # when the read was sent that the server has not answered
        self._probed_at = -PROBE_PAUSE
        self.is_lost = False

    @property
    def p95(self) -> float:
        """The latency in seconds that one read of twenty exceeds."""
        return self._p95

    @property
    def is_suspect(self) -> bool:
        """Whether another replica should be asked first: lost, or silent for much longer than usual."""
        asked_at = self._asked_at
        return self.is_lost or (asked_at is not None and time.monotonic() - asked_at > 10 * self._p95)

    def trouble(self) -> FleetError | None:
        """Connect. Returns None, or why this server is not the expected one; in that case it is lost."""
        return self._thread.submit(self._probe).result()

    def read(self, table: str, keys: Keys) -> Future[Floats]:
        """Rows of `keys`, all of which this shard owns. The future raises FleetError within the time-out."""
        return self._thread.submit(self._read, table, keys, time.monotonic() + self._timeout)

    def probe(self) -> None:
        """Look for a lost server again, in the background and at most every PROBE_PAUSE seconds."""
        now = time.monotonic()
        if self.is_lost and now - self._probed_at > PROBE_PAUSE:
            self._probed_at = now
            self._thread.submit(self._probe)

    def look(self) -> None:
        """As `probe`, and for a server that is not lost: ask it something, unless it is being asked."""
        now = time.monotonic()
        if now - self._probed_at > PROBE_PAUSE and self._asked_at is None:
            self._probed_at = now
            self._thread.submit(self._probe if self.is_lost else self._ping)

    def close(self) -> None:
        self._thread.submit(self._disconnect)  # the thread that owns the socket closes it
        self._thread.shutdown()

    def _read(self, table: str, keys: Keys, deadline: float) -> Floats:
        if self.is_lost or time.monotonic() > deadline:
            raise ServerUnreachable(f"{self.endpoint}, {self._name}, does not answer")
        began = self._asked_at = time.monotonic()
        try:
            rows = self._connected().pull(table, keys, create=False).result()
        except FleetError:
            self._lose()
            raise
        finally:
            self._asked_at = None
        self._measure(time.monotonic() - began)
        return rows

    def _probe(self) -> FleetError | None:
        try:
            self._connected()
        except FleetError as error:
            self._lose()
            return error
        self.is_lost = False
        return None

    def _ping(self) -> None:
        try:
            self._connected().stats()
        except FleetError:
            self._lose()

    def _measure(self, seconds: float) -> None:
        self._latencies.append(seconds)
        if len(self._latencies) >= _ENOUGH:
            ordered = sorted(self._latencies)
            self._p95 = ordered[int(0.95 * len(ordered))]

    def _lose(self) -> None:
        self.is_lost = True
        self._probed_at = time.monotonic()
        self._disconnect()

    def _connected(self) -> Client:
        if self._client is None:
            patience = Patience(self._timeout, retries=1)
            made = Client.connect([self.endpoint], self._key_folder, role=Role.WORKER, patience=patience)
            self._client = made  # a connection that fails the check is closed by _lose, or by close
            self._check_served(made)
            for spec in self._specs:
                made.attach(spec)
        return self._client

    def _check_served(self, client: Client) -> None:
        served = client.stats()[0].get("served")
        wanted = vars(self._expected)
        found = {name: served.get(name) for name in wanted} if isinstance(served, dict) else None
        if found != wanted:
            what = f"found {found}" if found else "found a server that is not read-only"
            raise FleetError(
                f"{self.endpoint}: expected {self._name}, {wanted}; {what}. Start it with `python -m torchfleet.server "
                f"--read_only MODEL --shard {self._expected.shard}/{self._expected.num_shards}` from the save that is "
                "served here."
            )

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def _name(self) -> str:
        return f"shard {self._expected.shard} of {self._expected.num_shards}"
