"""The rendezvous of ranks: the store of torch.distributed through which they form a process group.

A process may join several groups, one after another (fleet.init, fleet.stop_worker, fleet.init). Rank 0 or the launcher
serves the store. This process keeps its connection, and rank 0 its server, until the process ends: a rank that comes to
the second group before rank 0 does must find the server that rank 0 is going to use. The store still has the keys of
earlier groups then, with addresses that no longer exist. So all keys of a group have a prefix with its generation. When
a rank is replaced, all ranks begin another attempt and count its groups from zero: the new process has joined no group.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_torch: Any = dist  # its stubs lack `rendezvous`


class Rendezvous:
    """The store of this process, and how many groups it has joined through it: the same number on all ranks."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._place: tuple[object, ...] = ()  # where the store is, and this rank's place among the ranks
        self._attempt = self._generation = 0

    def begin(self, attempt: int) -> None:
        """Begin the attempt to train with this number, which is the same on all ranks."""
        self._attempt, self._generation = attempt, 0

    def next_store(self, master: str, rank: int, size: int, timeout: timedelta) -> Store:
        """The store for the next group. Waits until rank 0 serves it. All ranks call it together, equally often.

        `master`: host:port; "" for MASTER_ADDR and MASTER_PORT of the environment.
        """
        place = (master or (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")), rank, size)
        if self._store is None or place != self._place:
            method = f"tcp://{master}" if master else "env://"
            self._store, *_ = next(_torch.rendezvous(method, rank, size, timeout=timeout))
            self._place = place
        self._store.set_timeout(timeout)
        self._generation += 1  # also after a change of place: the process may come back to a store with old keys
        return PrefixStore(f"torchfleet attempt {self._attempt} generation {self._generation}", self._store)


rendezvous = Rendezvous()
