"""Where the machines of a collective job meet before every start of its ranks: rendezvous handlers for torch's agent.

One machine keeps a store in which all launchers talk; each start of the ranks gets a store of its own, so that nothing
that an earlier start left behind is taken for news. On loopback both listen to this machine only. (torch's own
handlers listen to every network, keep one store for all starts, and cannot be interrupted while they wait.)
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

from torchfleet.launch.stores import PATIENCE, Place, Say, reach, serve, serve_or_reach

_LAST_CALL = 5  # seconds that a job of MIN:MAX machines waits for more of them, once there are MIN
_PARTING = 3.0  # seconds that the machine with the store gives the others to hear how the job ended
_PERIOD = 0.1


class Meeting(RendezvousHandler):
    """What both kinds share. `num_starts`: how often the ranks of the job were started before this time."""

    def __init__(self, place: Place, store: TCPStore, is_host: bool, most: int, say: Say) -> None:
        self.place, self._store, self._is_host, self._say = place, store, is_host, say
        self._size = most
        self._round: Store = store
        self._of_ranks: TCPStore | None = None
        self.num_starts = 0

    @abstractmethod
    def _join(self) -> tuple[Store, int, int]:
        """Wait for the other machines: a store for this start only, this machine's number, and how many there are."""

    @abstractmethod
    def _own_host(self) -> str:
        """How other machines call this one."""

    def next_rendezvous(self) -> RendezvousInfo:
        with self._talking():
            self._round, number, self._size = self._join()
            self._of_ranks = None
            if number == 0:
                self._of_ranks = serve(Place(self._own_host(), 0))
                told = [self._own_host(), self._of_ranks.port, self._store.add("starts", 1) - 1]
                self._round.set("ranks", json.dumps(told))
            host, port, self.num_starts = json.loads(self._round.get("ranks"))
            return RendezvousInfo(self._round, number, self._size, RendezvousStoreInfo(host, port))

    def finish(self) -> None:
        """All ranks of this machine have done their work; returns when those of the other machines have too."""
        with self._talking():
            self._round.add("done", 1)
            while self._round.add("done", 0) < self._size:
                if self.num_nodes_waiting():
                    raise RendezvousClosedError("another machine starts again, but the ranks here have finished")
                time.sleep(_PERIOD)
            self._part(self._round, "parted")

    def end(self, reason: str) -> None:
        """Tell the other machines that the job is over."""
        with contextlib.suppress(RuntimeError):
            self._store.set("ended", reason)
            self._part(self._store, "heard")

    def _hear_the_end(self) -> None:
        if self._store.check(["ended"]):
            self._store.add("heard", 1)
            raise RendezvousClosedError(self._store.get("ended").decode())

    def _part(self, store: Store, key: str) -> None:
        """The machine with the store leaves last, but does not wait for ever."""
        deadline = time.monotonic() + (_PARTING if self._is_host else 0.0)
        store.add(key, 1)
        while store.add(key, 0) < self._size and time.monotonic() < deadline:
            time.sleep(_PERIOD)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's errors of the network and of stores
            raise RendezvousConnectionError(
                f"the launcher at {self.place} has ended or cannot be reached any more ({str(error).splitlines()[0]})"
            ) from None

    def get_backend(self) -> str:
        return "fleet"

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of a store that a launcher keeps, so no other rank depends on the process of rank 0."""
        return True

    def is_closed(self) -> bool:
        return bool(self._store.check(["ended"]))

    def set_closed(self) -> None:
        self.end("closed")

    def get_run_id(self) -> str:
        return "fleetrun"

    def shutdown(self) -> bool:
        return True


class FixedMeeting(Meeting):
    """A known number of machines, each with its own number; machine 0 keeps the store.

    When one of them asks for a new start, the others see it and start again with it. A machine that was lost may
    come back under its number.
    """

    def __init__(self, place: Place, machine: int, num_machines: int, say: Say) -> None:
        store = serve(place) if machine == 0 else reach(place, say)
        super().__init__(place, store, machine == 0, num_machines, say)
        self._machine, self._num_machines, self._next = machine, num_machines, 0

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
        deadline, is_told = time.monotonic() + PATIENCE, False
        while not self._store.check(keys):
            self._hear_the_end()
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"not all of the {self._num_machines} machines came to {self.place} within {PATIENCE:.0f} s"
                )
            if not is_told:
                self._say(f"[fleetrun] waiting for all {self._num_machines} machines at {self.place}")
                is_told = True
            time.sleep(_PERIOD)

    def _own_host(self) -> str:
        return self.place.host

    def num_nodes_waiting(self) -> int:
        with self._talking():
            self._hear_the_end()
            num = int(self._store.add(f"{self._next}/waiting", 0))
        if num:
            self._say("[fleetrun] another machine starts its ranks again; starting all ranks again")
        return num


class ElasticMeeting(Meeting):
    """Between `least` and `most` machines, which may come and go; who is there gets a number at every start.

    torch's c10d rendezvous decides who takes part. It keeps its state in the store as a pickle: whoever can write to
    the store can run code here.
    """

    def __init__(self, place: Place, is_here: bool, least: int, most: int, say: Say) -> None:
        store, is_host = serve_or_reach(place, say) if is_here else (reach(place, say), False)
        super().__init__(place, store, is_host, most, say)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # next_rendezvous makes the ranks' store
        parameters = RendezvousParameters(
            "c10d", str(place), self.get_run_id(), least, most, self._own_host(), join_timeout=int(PATIENCE),
            last_call_timeout=_LAST_CALL, keep_alive_interval=2, keep_alive_max_attempt=4,
        )  # fmt: skip
        self._members = create_handler(store, C10dRendezvousBackend(store, self.get_run_id()), parameters)

    def _join(self) -> tuple[Store, int, int]:
        self._hear_the_end()
        self._say(f"[fleetrun] meeting the other machines at {self.place}")
        joined = self._members.next_rendezvous()
        return joined.store, joined.rank, joined.world_size

    def _own_host(self) -> str:
        """The address that packets to the store leave from; nothing is sent."""
        family, _, _, _, address = socket.getaddrinfo(*self.place, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.connect(address)
            return str(one.getsockname()[0])

    def num_nodes_waiting(self) -> int:
        with self._talking():
            self._hear_the_end()
            num = self._members.num_nodes_waiting()
        if num:
            self._say("[fleetrun] a machine joins or starts again; starting all ranks again")
        return num

    def shutdown(self) -> bool:
        return self._members.shutdown()
