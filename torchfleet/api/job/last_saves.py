"""The last saves of worker 0: they are repeated when it stops, if other workers have trained after them.

A save cannot know whether it is the last one. `fleet.stop_worker` can: worker 0 has made no step since the save, and
makes no more. Only then does worker 0 wait for the other workers.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.stop_request import stop_request
from torchfleet.base.role.role_info import LOSS_WAIT, RoleInfo
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.model_saving import Kind

_PAUSE = 0.05  # seconds before the servers are asked again; doubles each time
_MAX_PAUSE = 1.0
_LONG = 5.0  # seconds of waiting, after which a message names the workers

Updates = list[dict[str, int]]  # by server and table
Stats = list[dict[str, Any]]


@dataclass(frozen=True)
class LastSave:
    dirname: str
    kind: Kind
    extra: Mapping[str, Any] | None
    updates: Updates  # in the tables before the save was made; it may lack later ones


class LastSaves:
    """Saves after the last step of this worker that later updates may outdate: when they were made, other workers had
    not stopped, or this worker had not sent everything.
    """

    def __init__(self, client: Client, info: RoleInfo, sync_timeout: float, fixed: Collection[str] = ()) -> None:
        """`sync_timeout`: seconds to wait for a worker that the servers have not heard of, or no longer hear of.
        `fixed`: tables that a save itself sets, and that no worker trains."""
        self._client, self._info, self._timeout, self._fixed = client, info, sync_timeout, fixed
        self._step = 0
        self._saves: dict[str, LastSave] = {}  # by path

    def note(self, step: int, path: str, save: LastSave, is_open: bool) -> None:
        """A save was made to `path` after `step` steps of this worker. `is_open`: the tables may still change."""
        if step != self._step:
            self._step, self._saves = step, {}
        self._saves.pop(path, None)
        if is_open:
            self._saves[path] = save

    def state(self) -> tuple[Updates, bool]:
        """Call it before a save: the updates of the tables, and whether other workers are at work."""
        servers = self._client.stats()
        return self._updates(servers), bool(_at_work(servers, self._info.worker_index))

    def after(self, step: int) -> list[LastSave]:
        """The saves that were made after this step."""
        return list(self._saves.values()) if step == self._step else []

    def wait_for_others(self) -> None:
        """Wait until all other workers have stopped, or the job is asked to end. Says on stderr which workers it does
        not wait for.
        """
        start, pause, is_told = time.monotonic(), _PAUSE, False
        while True:
            servers, waited = self._client.stats(), time.monotonic() - start
            others = _at_work(servers, self._info.worker_index)
            gone = others & self._gone(servers, others, waited)
            if others == gone or stop_request.was_seen():
                gone = others
                break
            if waited >= _LONG and not is_told:
                tell(f"fleet.stop_worker: waits for {_named(others - gone)} to stop, and saves the model again then")
                is_told = True
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        if gone:
            named = _named(gone)
            tell(
                f"fleet.stop_worker: stops waiting for {named}: no heartbeat reaches the servers, or the job was asked "
                f"to end. The saved model includes the gradients pushed so far. Look at the log of {named}."
            )

    def _gone(self, servers: Stats, others: set[int], waited: float) -> set[int]:
        """The workers not to wait for: lost workers, unless the job waits for lost workers; after the time-out, all
        lost workers and those that never joined.
        """
        joined = {worker["worker"] for server in servers for worker in server["workers"]}
        silent = {worker["worker"] for server in servers for worker in server["workers"] if worker["is_lost"]}
        if waited >= self._timeout:
            return silent | (others - joined)
        return set() if self._info.on_worker_loss == LOSS_WAIT else silent

    def is_outdated(self, save: LastSave) -> bool:
        """Whether the tables have been updated since the save."""
        return self._updates(self._client.stats()) != save.updates

    def _updates(self, servers: Stats) -> Updates:
        return [
            {name: int(table["step"]) for name, table in server["tables"].items() if name not in self._fixed}
            for server in servers
        ]


def _at_work(servers: Stats, own: int) -> set[int]:
    """The other workers that have neither stopped nor made their last step."""
    return {worker for server in servers for worker in server["members"]["expected"]} - {own}


def _named(workers: set[int]) -> str:
    numbers = ", ".join(map(str, sorted(workers)))
    return f"worker {numbers}" if len(workers) == 1 else f"workers {numbers}"
