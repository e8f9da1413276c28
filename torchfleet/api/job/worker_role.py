"""A process of a job as a worker: connected to the servers, training in the mode of its strategy."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchfleet.api.hybrid.hybrid_optimizer import HybridOptimizer
from torchfleet.api.job.job_setup import JobSetup
from torchfleet.api.job.joining import catch_up, check_loss_rule, check_releases, claims_of
from torchfleet.api.job.mode_choice import make_communicator, make_whole_tables
from torchfleet.api.job.model_hooks import LEFT, hook_model, trace_steps, watch_schedules
from torchfleet.api.job.server_links import ServerLinks
from torchfleet.api.job.worker_start import (
    check_loaded,
    make_tables,
    patience_with,
    wait_for_servers,
    with_known_restart,
)
from torchfleet.api.job.worker_status import WorkerStatus
from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.freshness import ages_by_kind
from torchfleet.base.monitor.stop_request import end_with_save, stop_request
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint.manifest import Manifest
from torchfleet.ps.tables.rows.row_statistics import is_pushed
from torchfleet.ps.tables.settings.clock import MAX_TIME
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.membership import Membership
from torchfleet.ps.worker.model_saving import Kind, save_model, tell_of_replacing
from torchfleet.ps.worker.model_state import ModelState, Servers
from torchfleet.ps.worker.modes.communicator import Communicator
from torchfleet.ps.worker.modes.whole_tables import WholeTables
from torchfleet.ps.worker.peers import Workers

if TYPE_CHECKING:
    from torchfleet.api.hybrid.hybrid_worker import HybridWorker


class WorkerRole:
    """The worker's life: connected, tables ready, everybody's first values equal; then steps; then leave."""

    def __init__(self, setup: JobSetup, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        self._setup, self.info, self._plan = setup, setup.info, setup.plan
        assert setup.strategy is not None
        assert setup.model is not None
        self.strategy, self.model, self._optimizers = setup.strategy, setup.model, setup.optimizers
        self._ends = contextlib.ExitStack()  # what `abandon` does, the latest first
        patience = patience_with(self.strategy, self.info)
        self._links = ServerLinks(self.info, self._plan, patience, dirname, var_names)
        self.first_step = 0  # with which this worker begins: in sync mode more than 0 if it was started again
        self._saved_to: set[str] = set()
        self._passes: Counter[str] = Counter()  # over shared lists of files, by name
        self._known_status: WorkerStatus | None = None  # until training can begin
        self.client = self._connect()
        self._ends.callback(self.client.close)
        try:
            self._begin(setup, dirname)
        except BaseException:
            self.abandon()
            raise

    def _begin(self, setup: JobSetup, dirname: str | None) -> None:
        """All that may fail: connected, joined, tables made, threads started, the model bound."""
        wait_for_servers(self.client, self.info.start_timeout)
        check_loss_rule(self.strategy.mode, self.info)
        setup.info = self.info = with_known_restart(self.client, self.info)
        self._membership = self._join()
        setup.info = self.info
        if dirname is not None:
            check_loaded(self.client, dirname)
        make_tables(self.client, self._plan, self.info, self.strategy)
        self.communicator: Communicator = make_communicator(setup, self.client, self._connect, lambda: self.num_workers)
        self._ends.callback(self.communicator.release)
        self._hybrid = self._hybrid_worker()
        if self._hybrid is not None:
            self._ends.callback(self._hybrid.close, True)
        pushed = {name: group.spec.entry for name, group in self._plan.sparse.items() if is_pushed(group.spec)}
        modules = {name: group.modules for name, group in self._plan.sparse.items()}
        self.engine = Engine(self.communicator, modules, pushed)
        self.status = self._known_status = WorkerStatus(
            self.info, self.strategy.mode, lambda: self.communicator, self.engine
        )
        self._ends.callback(self.status.close)
        self._schedules = watch_schedules(self.info, self.strategy.mode, self._optimizers[0], setup.global_schedulers)
        self._bind()
        self._ends.callback(self._model_state().close, LEFT)
        self._tracing = trace_steps(self.info, self.strategy.mode, self.model, self._optimizers)
        self._ends.callback(self._tracing.close)
        self.communicator.start()
        self.status.write(now=True)

    def barrier(self, what: str = "fleet.barrier_worker()", name: str = "workers") -> None:
        if self._membership is not None:
            self._membership.check()
        self.meet(what)
        self.communicator.rest()
        # One name for all of them: a worker that was started again cannot know how many there have been.
        self.client.barrier(name, self.info.num_workers, self.strategy.sync_timeout)

    @property
    def num_workers(self) -> int:
        """Of the job; of an elastic one, those that are there."""
        return self._membership.num_members if self._membership and self.info.is_elastic else self.info.num_workers

    def meet(self, what: str) -> None:
        """Before workers wait for each other at a server: in hybrid mode one of them may be held up in a step."""
        if self._hybrid is not None:
            self._hybrid.meet(what)

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, with rows of the next on their way, and with a fresh network also where parts of the
        model are called by themselves."""
        for item in self.status.follow(loader, self.engine.prefetch(loader)):
            self.communicator.freshen()
            yield item

    def report(self, metrics: dict[str, float]) -> None:
        self.status.report(metrics)

    def workers(self) -> Workers:
        """All workers, for things they do among themselves."""
        self.communicator.rest()
        return Workers(
            self._connect(), self.info.worker_index, self.info.num_workers, self.strategy.sync_timeout, self._passes
        )

    def whole_tables(self, share: float | None, shared: bool = False) -> WholeTables:
        """From now on this worker trains on whole copies of the tables, in the place of what its mode does."""
        if isinstance(self.communicator, WholeTables):
            raise FleetError("fleet.whole_tables() was called before: a worker has one set of them")
        tables = make_whole_tables(self._setup, self.client, self._connect, self.workers, share, shared)
        self.communicator.stop()
        self.communicator = tables
        self.engine.use(tables)
        for optimizer in self._optimizers:
            optimizer.bind(self.engine, tables)
        tables.start()
        return tables

    def save(self, dirname: str, kind: Kind, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Save the model as it is with the servers, this worker's gradients included."""
        self.communicator.flush()
        storage = Storage(dirname)
        # One that was started again does not know what it saved before.
        if not self.info.restart and storage.path not in self._saved_to:
            tell_of_replacing(storage, kind, {server["model"] for server in self.client.stats()})
        if self._hybrid is not None:
            self._hybrid.put_network()
        saved = save_model(self.client, self._plan, dirname, self.strategy.sync_timeout, kind, extra)
        self._saved_to.add(storage.path)
        return saved

    def is_asked_to_stop(self) -> bool:
        return self.info.worker_index == 0 and stop_request.has_come()

    def shrink(self, table: str | None, policy: Shrink) -> dict[str, int]:
        self.communicator.flush()
        return self.client.shrink(table or "", policy, self.strategy.sync_timeout)

    def set_time(self, seconds: float) -> dict[str, int]:
        try:
            now = int(seconds)
        except (TypeError, ValueError, OverflowError):  # NaN and infinity among them
            now = -1
        if not 0 <= now <= MAX_TIME:
            raise FleetError(f"a time is a number of seconds since 1970, 0 to {MAX_TIME}; found {seconds!r}")
        return self.client.set_clock(now, self.strategy.sync_timeout)

    def stop(self, alone: bool = False) -> dict[str, Any]:
        """Everything under way reaches the servers, then they are told. Returns the last statistics.

        `alone`: other workers of hybrid mode are not waited for.
        """
        self.communicator.stop()
        if self._hybrid is not None:
            self._hybrid.close(alone)
        final = self.stats()
        self.status.has_left = True
        self.status.write(now=True)
        if self._membership is not None:
            self._membership.close()  # before it leaves: a sign of life behind that would be none
            self._membership.check()
        self.client.leave()
        self._ends.close()
        return final

    def abandon(self) -> None:
        """Let everything go without a word to the servers: connections, signs of life, the hold on model and optimizer.

        Threads that send have ended by then, or were never started: `stop` ends them also where it fails.
        """
        self._ends.close()

    def stats(self) -> dict[str, Any]:
        worker = {
            **self.communicator.stats(),
            "samples": self.engine.num_samples,
            "lookups": self.engine.num_lookups,
            "unforeseen_lookups": self.engine.foresight.num_unforeseen,
            "unforeseen": self.engine.unforeseen(),
        }
        servers = self.client.stats()
        ages = ages_by_kind(table for server in servers for table in server["tables"].values())
        dropped = sum(server["dropped"] for server in servers)
        return {"mode": self.strategy.mode, "worker": worker, "servers": servers, **ages, "dropped": dropped}

    def _connect(self, worker: int | None = None) -> Client:
        """`worker`: another one for whom this one speaks."""
        return self._links.connect(worker)

    def _join(self) -> Membership | None:
        if self.info.is_local:
            return None
        info, strategy = self.info, self.strategy
        check_releases(self.client)
        claims = claims_of(self._plan.specs, strategy, info.num_servers)
        made = Membership(self._connect(), info, strategy.sync_timeout, self._waiting_share, claims)
        self._ends.callback(made.close)
        if strategy.mode != "hybrid":  # its workers start together, and their launcher says how often they did
            self.info = replace(info, restart=max(info.restart, *(joined.restarts for joined in made.told)))
        if strategy.mode == "sync":
            self.first_step = catch_up(self.client, made.told, len(self._optimizers), strategy.sync_timeout)
        return made

    def _waiting_share(self) -> float | None:
        return None if self._known_status is None else self._known_status.waiting_share()

    def _hybrid_worker(self) -> HybridWorker | None:
        optimizer = self._optimizers[0]
        if not isinstance(optimizer, HybridOptimizer):
            return None
        from torchfleet.api.hybrid.hybrid_worker import HybridWorker  # torch.distributed is for those who need it

        with self.workers() as others:
            return HybridWorker(self.model, optimizer, self.strategy, self.info, self.client, others.gather)

    def _bind(self) -> None:
        hook_model(self.model, self._plan, self.engine, lambda: self.communicator, self._ends)
        for optimizer in self._optimizers:
            self._ends.callback(optimizer.unbind, LEFT)
        if self._hybrid is not None:
            self.engine.agreed, self.engine.on_training = self._hybrid.agreed, self._hybrid.begin_lookup
        for optimizer in self._optimizers:
            optimizer.bind(self.engine, self.communicator)
            optimizer.after_step = self._step_made
        self._optimizers[-1].after_step = self._whole_step_made

    def _model_state(self) -> ModelState:
        put_network = None if self._hybrid is None else self._hybrid.put_network
        meet = partial(self.barrier, "load_state_dict()", "load_state_dict")
        servers = Servers(self.client, self._connect, lambda: self.communicator, meet, put_network)
        is_first, is_restarted = self.info.worker_index == 0, bool(self.info.restart)
        return ModelState(self.model, self._plan, self.engine, is_first, is_restarted, servers)

    def _whole_step_made(self) -> None:
        """Of all optimizers."""
        self._step_made()
        self._tracing.step_made()
        folder = self.info.save_on_stop
        if folder and self.is_asked_to_stop():
            end_with_save(lambda: self.save(folder, "full"), folder)

    def _step_made(self) -> None:
        self.status.step_made()
        if self._hybrid is not None:
            self._hybrid.step_made()
        if self._schedules is not None:
            self._schedules.step_made()
