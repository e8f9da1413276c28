"""A worker process of a job: it trains in the mode of its strategy, saves, waits for others, and leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchfleet.api.job.started_worker import StartedWorker
from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.freshness import ages_by_kind
from torchfleet.ps.checkpoint.manifest import Manifest
from torchfleet.ps.tables.settings.clock import MAX_TIME
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.worker.model_saving import Kind
from torchfleet.ps.worker.modes.whole_tables import WholeTables


class WorkerRole(StartedWorker):
    """What a worker does between its start and its end."""

    def barrier(self, what: str = "fleet.barrier_worker()") -> None:
        """Hand over what this worker has learned, and wait for all others: then all have the servers' network, and
        the buffers of worker 0.
        """
        is_exchanged = not isinstance(self.communicator, WholeTables)  # their arrays are exchanged by their own flush
        if is_exchanged:
            self.communicator.hand_over()
        self._give_buffers()
        self._wait_for_all(what)
        if is_exchanged:
            self.communicator.flush()
        self._take_buffers()

    def _give_buffers(self) -> None:
        """Worker 0 gives the servers what its training has changed in buffers, as the statistics of batch norms."""
        if self.info.worker_index == 0 and self.info.num_workers > 1:
            with contextlib.nullcontext() if self._buffers is None else self._buffers.resting():  # it has older ones
                for group in self._plan.fixed:
                    if group.has_changed():
                        self.client.set_dense(group.spec.name, group.values())
                        group.watch()

    def _take_buffers(self) -> None:
        """The other workers follow worker 0, as ranks follow rank 0."""
        if self.info.worker_index > 0:
            for group in self._plan.fixed:
                if group.has_changed():
                    group.write(self.client.pull_dense(group.spec.name).result())
                    group.watch()

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches. Pulls rows of the next batch in advance, and refreshes the network even if only
        parts of the model are called.
        """
        for item in self.status.follow(loader, self.engine.prefetch(loader)):
            if self.model.training:  # a prediction takes the servers' network at its first call
                self.communicator.freshen()
            yield item

    def report(self, metrics: dict[str, float]) -> None:
        self.status.report(metrics)

    def whole_tables(self, share: float | None, shared: bool = False) -> WholeTables:
        """From now on, train on whole copies of the tables instead of in the worker's mode."""
        return self._mode.whole_tables(self.workers, share, shared)

    def allow_threads(self) -> None:
        """As TrainingMode.allow_threads."""
        self._mode.allow_threads()

    def save(self, dirname: str, kind: Kind, extra: Mapping[str, Any] | None = None) -> Manifest:
        """As WorkerSaves.save."""
        return self._saves.save(dirname, kind, extra)

    @property
    def replaced_saves(self) -> dict[str, int]:
        """By path: the number of the save of an earlier job that a save of this one has replaced."""
        return self._saves.replaced

    def complete_saves(self) -> list[str]:
        """As WorkerSaves.complete."""
        return self._saves.complete()

    def shrink(self, table: str | None, policy: Shrink) -> dict[str, int]:
        self.communicator.flush()
        dropped = self.client.shrink(table or "", policy, self.strategy.sync_timeout)
        for cache in self._caches.values():  # they may hold dropped rows
            cache.empty()
        return dropped

    def set_time(self, seconds: float) -> dict[str, int]:
        try:
            now = int(seconds)
        except (TypeError, ValueError, OverflowError):  # also NaN and infinity
            now = -1
        if not 0 <= now <= MAX_TIME:
            raise FleetError(f"a time is a number of seconds since 1970, 0 to {MAX_TIME}; found {seconds!r}")
        return self.client.set_clock(now, self.strategy.sync_timeout)

    def stop(self, alone: bool = False) -> dict[str, Any]:
        """Send all queued gradients, then leave the servers. Returns the last statistics.

        `alone`: do not wait for other workers in hybrid mode.
        """
        self.communicator.stop()
        if self._buffers is not None:
            self._buffers.close()
        if self._hybrid is not None:
            self._hybrid.close(alone)
        final = self.stats()
        if self._blocks is not None:
            self._blocks.close(is_told=True)
        self.status.has_left = True
        self.status.write(now=True)
        if self._membership is not None:
            self._membership.close()  # before leaving: a heartbeat after that would be invalid
            self._membership.check()
        self.client.leave()
        self._ends.close()
        return final

    def stats(self) -> dict[str, Any]:
        worker = {
            **self.communicator.stats(),
            "samples": self.engine.num_samples,
            "lookups": self.engine.num_lookups,
            "unforeseen_lookups": self.engine.foresight.num_unforeseen,
            "unforeseen": self.engine.unforeseen(),
            "unforeseen_wait": self.engine.unforeseen_cost.share,
        }
        if self._blocks is not None:
            worker["heter"] = self._blocks.stats()
        if self._hybrid is not None and (exchange := self._hybrid.stats()):
            worker["exchange"] = exchange
        servers = self.client.stats()
        ages = ages_by_kind(table for server in servers for table in server["tables"].values())
        dropped = sum(server["dropped"] for server in servers)
        rounds = {"quorum": servers[0]["quorum"]} if "quorum" in servers[0] else {}
        return {"mode": self.strategy.mode, "worker": worker, "servers": servers, **ages, "dropped": dropped, **rounds}
