"""Rendezvous handlers for torch's elastic agent: the machines of a collective job meet before every start of its ranks.

One machine serves a store that all launchers use. Every start of the ranks gets a store of its own, so that no rank
reads a value of an earlier start. On loopback, both stores accept connections from this machine only. (torch's own
handlers listen on every interface, use one store for all starts, and cannot be interrupted while they wait.)
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Iterator

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from torchfleet.base.errors import RoleError
from torchfleet.collective.elastic.attempts import Attempts
from torchfleet.launch.ranks.stores import PATIENCE, Report, StoreAddress, reach, serve, serve_or_reach

_LAST_CALL = 5  # seconds that a job of MIN:MAX machines waits for more machines after MIN have joined
_PARTING = 10.0  # seconds that the machine with the store waits for the others to read how the job ended
_RANK_STORE = (
    30.0  # seconds in which a machine reaches the store of the ranks, which was served before it was announced
)
_PERIOD = 0.1  # seconds between two polls of the store


class RankStoreLost(Exception):
    """The machine that serves the ranks' store of this start is lost. All ranks can start again without it."""


class Rendezvous(RendezvousHandler):
    """Base of the fixed and the elastic rendezvous. `num_starts`: number of starts of the ranks before this one."""

    def __init__(
        self, address: StoreAddress, store: TCPStore, is_host: bool, max_machines: int, report: Report
    ) -> None:
        self.address, self._store, self._is_host, self._report = address, store, is_host, report
        self._num_machines = max_machines
        self._start_store: Store = store  # of this start of the ranks only
        self._rank_store: TCPStore | None = None
        self._rank_store_error = ""  # why the store of the ranks is lost; empty while it is not
        self._rank_address = address
        self.num_starts = 0

    @abstractmethod
    def _join(self) -> tuple[Store, int, int]:
        """Block until the other machines have joined. Returns a store for this start only, this machine's number, and
        the number of machines."""

    @abstractmethod
    def _own_host(self) -> str:
        """Return the address by which the other machines reach this one."""

    def next_rendezvous(self) -> RendezvousInfo:
        with self._store_errors():
            self._start_store, number, self._num_machines = self._join()
            self._rank_store, self._rank_store_error = None, ""
            if number == 0:
                self._rank_store = serve(StoreAddress(self._own_host(), 0))
                announced = [self._own_host(), self._rank_store.port, self._store.add("starts", 1) - 1]
                self._start_store.set("ranks", json.dumps(announced))
            host, port, self.num_starts = json.loads(self._start_store.get("ranks"))
            self._rank_address = StoreAddress(host, port)
            return RendezvousInfo(self._start_store, number, self._num_machines, RendezvousStoreInfo(host, port))

    @contextlib.contextmanager
    def rank_attempts(self, num_ranks: int) -> Iterator[Attempts]:
        """The attempts of the ranks, in the store of this start. Call this after `next_rendezvous` has returned. Raises
        RankStoreLost if the store of the ranks is lost, but not the store of the launchers. Later calls for this start
        then raise it at once, because the launcher that asks can watch no rank while it waits."""
        if self._rank_store_error:
            raise RankStoreLost(self._rank_store_error)
        try:
            if self._rank_store is None:
                self._rank_store = reach(self._rank_address, self._report, _RANK_STORE)
            yield Attempts(self._rank_store, num_ranks)
        except (RuntimeError, RoleError) as error:
            with self._store_errors():
                self._store.add("starts", 0)
            self._rank_store_error = str(error).splitlines()[0]
            raise RankStoreLost(self._rank_store_error) from None

    def finish(self) -> None:
        """Report that all ranks of this machine have finished, and block until those of the other machines have."""
        with self._store_errors():
            self._start_store.add("done", 1)
            while self._start_store.add("done", 0) < self._num_machines:
                if self.num_nodes_waiting():
                    raise RendezvousClosedError("another machine starts again, but the ranks here have finished")
                time.sleep(_PERIOD)
            self._leave(self._start_store, "parted")

    def end(self, reason: str) -> None:
        """Announce to the other machines that the job is over, and why."""
        with contextlib.suppress(RuntimeError):
            self._store.set("ended", reason)
            self._leave(self._store, "heard")

    def _raise_if_ended(self) -> None:
        """Raise if another machine has announced the end of the job."""
        if self._store.check(["ended"]):
            self._store.add("heard", 1)
            raise RendezvousClosedError(self._store.get("ended").decode())

    def _leave(self, store: Store, key: str) -> None:
        """Count this machine as leaving. The machine that serves the store waits for the others, up to _PARTING."""
        deadline = time.monotonic() + (_PARTING if self._is_host else 0.0)
        store.add(key, 1)
        while store.add(key, 0) < self._num_machines and time.monotonic() < deadline:
            time.sleep(_PERIOD)

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch raises it for network and store errors
            raise RendezvousConnectionError(
                f"the launcher at {self.address} has ended or cannot be reached any more ({str(error).splitlines()[0]})"
            ) from None

    def get_backend(self) -> str:
        return "fleet"

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of a store that a launcher serves, so that no rank depends on the process of rank 0."""
        return True

    def is_closed(self) -> bool:
        return bool(self._store.check(["ended"]))

    def set_closed(self) -> None:
        self.end("closed")

    def get_run_id(self) -> str:
        return "fleetrun"

    def shutdown(self) -> bool:
        return True


class FixedRendezvous(Rendezvous):
    """A known number of machines, each with a fixed number; machine 0 serves the store.

    When one machine asks for a new start, the others notice and start again with it. A lost machine may come back
    under its number.
    """

    def __init__(self, address: StoreAddress, machine: int, num_machines: int, report: Report) -> None:
        store = serve(address) if machine == 0 else reach(address, report)
        super().__init__(address, store, machine == 0, num_machines, report)
        self._machine, self._next = machine, 0

    def _join(self) -> tuple[Store, int, int]:
        number = self._store.add("formed", 0)
        self._store.set(f"{number}/{self._machine}", "here")
        self._store.add(f"{number}/waiting", 1)
        all_here = [f"{number}/{machine}" for machine in range(self._num_machines)]
        self._wait_for(all_here if self._machine == 0 else [f"{number}/formed"])
        if self._machine == 0:
            self._store.add("formed", 1)
            self._store.set(f"{number}/formed", "yes")
        self._next = number + 1
        return PrefixStore(f"start/{number}", self._store), self._machine, self._num_machines

    def _wait_for(self, keys: list[str]) -> None:
        deadline, is_reported = time.monotonic() + PATIENCE, False
        while not self._store.check(keys):
            self._raise_if_ended()
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"not all of the {self._num_machines} machines came to {self.address} within {PATIENCE:.0f} s"
                )
            if not is_reported:
                self._report(f"[fleetrun] waiting for all {self._num_machines} machines at {self.address}")
                is_reported = True
            time.sleep(_PERIOD)

    def _own_host(self) -> str:
        return self.address.host

    def num_nodes_waiting(self) -> int:
        with self._store_errors():
            self._raise_if_ended()
            num = int(self._store.add(f"{self._next}/waiting", 0))
        if num:
            self._report("[fleetrun] another machine starts its ranks again; starting all ranks again")
        return num


class ElasticRendezvous(Rendezvous):
    """Between `min_machines` and `max_machines` machines, which come and go; they are numbered at every start.

    torch's c10d rendezvous decides which machines take part. It keeps its state in the store as a pickle: a process
    that can write to the store can run code here.
    """

    def __init__(
        self, address: StoreAddress, is_here: bool, min_machines: int, max_machines: int, report: Report
    ) -> None:
        store, is_host = serve_or_reach(address, report) if is_here else (reach(address, report), False)
        super().__init__(address, store, is_host, max_machines, report)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # next_rendezvous creates the ranks' store
        parameters = RendezvousParameters(
            "c10d", str(address), self.get_run_id(), min_machines, max_machines, self._own_host(),
            join_timeout=int(PATIENCE), last_call_timeout=_LAST_CALL, keep_alive_interval=2, keep_alive_max_attempt=4,
        )  # fmt: skip
        self._members = create_handler(store, C10dRendezvousBackend(store, self.get_run_id()), parameters)

    def _join(self) -> tuple[Store, int, int]:
        self._raise_if_ended()
        self._report(f"[fleetrun] meeting the other machines at {self.address}")
        joined = self._members.next_rendezvous()
        return joined.store, joined.rank, joined.world_size

    def _own_host(self) -> str:
        """Return the local address of packets to the store. Sends nothing."""
        family, _, _, _, resolved = socket.getaddrinfo(*self.address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(resolved)
            return str(probe.getsockname()[0])

    def num_nodes_waiting(self) -> int:
        with self._store_errors():
            self._raise_if_ended()
            num = self._members.num_nodes_waiting()
        if num:
            self._report("[fleetrun] a machine joins or starts again; starting all ranks again")
        return num

    def shutdown(self) -> bool:
        return self._members.shutdown()
