"""What processes tell of busy servers and waiting workers: now, and over the whole job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torchfleet.base.monitor.bottleneck import Machine, bottleneck

Name = tuple[str, int]  # role and index


class JobLoad:
    """Takes notes of the shares that servers and workers of this machine report while they run."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores, self._num_processes = num_cores, 0
        self._is_sync = False
        self._sums: dict[Name, float] = defaultdict(float)  # of all looks
        self._num_looks: dict[Name, int] = defaultdict(int)

    def look(self, statuses: Mapping[Name, Mapping[str, Any]]) -> str:
        """The last status of every process: returns what the job waits for now, or nothing while that is not known.

        Without the shares: whoever looks shows them beside it.
        """
        self._num_processes = max(self._num_processes, len(statuses))  # those that end last make no room
        now: dict[Name, float] = {}
        for name, status in statuses.items():
            self._is_sync |= status.get("mode") == "sync"
            share = status.get("busy" if name[0] == "server" else "waiting")
            if isinstance(share, (int, float)) and not status.get("left"):
                now[name] = share
        if len({role for role, _ in now}) == 2:  # a server that waits for the first worker is no idle server
            for name, share in now.items():
                self._sums[name] += share
                self._num_looks[name] += 1
        return self._sentence(now, tells_shares=False)

    def whole(self) -> str:
        """What the job waited for, on average over all looks."""
        return self._sentence({name: total / self._num_looks[name] for name, total in self._sums.items()})

    def _sentence(self, shares: Mapping[Name, float], tells_shares: bool = True) -> str:
        busy, waits = ([share for (role, _), share in shares.items() if role == it] for it in ("server", "worker"))
        return bottleneck(busy, waits, Machine(self._num_cores, self._num_processes), self._is_sync, tells_shares)
