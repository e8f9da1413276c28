"""A worker process of a job: connected to the servers, training in the mode of its strategy."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchfleet.api.hybrid.exchange_choice import chosen_exchange, network_device
from torchfleet.api.hybrid.hybrid_optimizer import HybridOptimizer
from torchfleet.api.job.heter_role import heter_blocks, place_blocks, remote_blocks
from torchfleet.api.job.job_setup import JobSetup
from torchfleet.api.job.joining import FREE_MODES, catch_up, check_loss_rule, check_releases, claims_of
from torchfleet.api.job.last_saves import LastSave, LastSaves
from torchfleet.api.job.mode_choice import make_communicator, make_unbounded, make_whole_tables
from torchfleet.api.job.model_hooks import LEFT, global_schedules, hook_model, trace_steps
from torchfleet.api.job.row_caches import make_caches
from torchfleet.api.job.server_links import ServerLinks
from torchfleet.api.job.worker_start import (
    check_loaded,
    make_tables,
    patience_with,
    wait_for_backups,
    wait_for_servers,
    with_known_restart,
)
from torchfleet.api.job.worker_status import WorkerStatus
from torchfleet.api.serving.description import ModelDescriber
from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.freshness import ages_by_kind
from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.stop_request import end_with_save, stop_request
from torchfleet.base.role.role_info import LOSS_END
from torchfleet.base.storage import Storage
from torchfleet.base.strategy.server_fields import NUM_WORKERS, SERVERS
from torchfleet.ps.checkpoint.manifest import Manifest
from torchfleet.ps.kernels.team import TEAM
from torchfleet.ps.tables.rows.row_statistics import is_pushed
from torchfleet.ps.tables.settings.clock import MAX_TIME
from torchfleet.ps.tables.settings.policy import Shrink
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.heter.remote_block import RemoteBlocks
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.membership import Membership
from torchfleet.ps.worker.model_saving import Kind, save_model, tell_of_replacing
from torchfleet.ps.worker.model_state import ModelState, Servers
from torchfleet.ps.worker.modes.bounded import Bounded
from torchfleet.ps.worker.modes.communicator import Communicator
from torchfleet.ps.worker.modes.whole_tables import WholeTables
from torchfleet.ps.worker.peers import Workers

if TYPE_CHECKING:
    from torchfleet.api.hybrid.hybrid_worker import HybridWorker


class WorkerRole:
    """The life of a worker: connect, prepare tables with equal initial values on all workers, make steps, leave."""

    def __init__(self, setup: JobSetup, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        self._setup, self.info, self._plan = setup, setup.info, setup.plan
        assert setup.strategy is not None
        assert setup.model is not None
        self.strategy, self.model, self._optimizers = setup.strategy, setup.model, setup.optimizers
        self._ends = contextlib.ExitStack()  # cleanup for `abandon`, in reverse order
        patience = patience_with(self.strategy, self.info)
        self._links = ServerLinks(self.info, self._plan, patience, dirname, var_names)
        self.first_step = 0  # the worker's first step: in sync mode above 0 after a restart
        self._saved_to: set[str] = set()
        self._passes: Counter[str] = Counter()  # over shared lists of files, by name
        self._blocks: RemoteBlocks | None = None  # what heter workers compute
        self._known_status: WorkerStatus | None = None  # until training can begin
        self.client = self._connect()
        self._ends.callback(self.client.close)
        try:
            self._begin(setup, dirname, var_names)
        except BaseException:
            self.abandon()
            raise

    def _begin(self, setup: JobSetup, dirname: str | None, var_names: Sequence[str] | None) -> None:
        """All steps that may fail: connect, join, create tables, start threads, bind the model."""
        if self.info.is_local:  # its tables are here: kernels use as many threads as torch does
            TEAM.resize(torch.get_num_threads())
            self._ends.callback(TEAM.resize, 1)
        if self.info.heter_endpoints:
            heter_blocks(self.model, self.info, self.strategy)  # raises before anything is created
        plan, loaded = setup.plan, None if dirname is None else os.fspath(dirname)

        def give_tables(servers: Collection[str]) -> None:
            self.client.give_tables(servers, plan.specs, plan.layouts, loaded, var_names)

        is_first = self.info.worker_index == 0
        wait_for_servers(self.client, self.info.start_timeout, give_tables if is_first else None)
        check_loss_rule(self.strategy.mode, self.info)
        is_hybrid = self.strategy.mode == "hybrid"
        self._exchange = chosen_exchange(self.strategy, self.info, network_device(self._plan)) if is_hybrid else ""
        setup.info = self.info = with_known_restart(self.client, self.info)
        self._membership = self._join()
        fixed = [group.spec.name for group in setup.plan.fixed]
        self._last_saves = LastSaves(self.client, self.info, self.strategy.sync_timeout, fixed)
        setup.info = self.info
        if dirname is not None:
            check_loaded(self.client, dirname)
        make_tables(self.client, self._plan, self.info, self.strategy)
        wait_for_backups(self.client, self.info)
        self.communicator: Communicator = make_communicator(setup, self.client, self._connect, lambda: self.num_workers)
        self._ends.callback(self.communicator.release)
        self._hybrid = self._hybrid_worker()
        if self._hybrid is not None:
            self._ends.callback(self._hybrid.close, True)
        pushed = {name: group.spec.entry for name, group in self._plan.sparse.items() if is_pushed(group.spec)}
        modules = {name: group.modules for name, group in self._plan.sparse.items()}
        self._caches = make_caches(self._plan, self.client, self._connect, self._ends)
        self._use_caches(self.communicator)
        self.engine = Engine(self.communicator, modules, pushed, self._caches)
        self.describer = ModelDescriber(self.model)
        if self.info.worker_index == 0:
            self.engine.on_first_call = self.describer.note_call
        self.status = self._known_status = WorkerStatus(
            self.info, self.strategy.mode, lambda: self.communicator, self.engine
        )
        self._ends.callback(self.status.close)
        self._schedules = global_schedules(self.info, self.strategy.mode, self._optimizers[0])
        self._bind()
        self._compute_blocks()
        self._ends.callback(self._model_state().close, LEFT)
        self._tracing = trace_steps(self.info, self.strategy.mode, self.model, self._optimizers)
        self._ends.callback(self._tracing.close)
        self.communicator.start()
        self.status.write(now=True)

    def barrier(self, what: str = "fleet.barrier_worker()") -> None:
        """Hand over what this worker has learned, and wait for all others: then all have the servers' network."""
        is_exchanged = not isinstance(self.communicator, WholeTables)  # whose arrays change with their own flush
        if is_exchanged:
            self.communicator.hand_over()
        self._wait_for_all(what)
        if is_exchanged:
            self.communicator.flush()

    def _wait_for_all(self, what: str, name: str = "workers") -> None:
        if self._membership is not None:
            self._membership.check()
        self.meet(what)
        self.communicator.rest()
        # All barriers share a name: a restarted worker does not know how many there have been.
        self.client.barrier(name, self.info.num_workers, self.strategy.sync_timeout)

    @property
    def num_workers(self) -> int:
        """Workers of the job; of an elastic job, the present ones."""
        return self._membership.num_members if self._membership and self.info.is_elastic else self.info.num_workers

    def meet(self, what: str) -> None:
        """Call before workers wait for each other at a server: in hybrid mode a worker may still wait in a step."""
        if self._hybrid is not None:
            self._hybrid.meet(what)

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches. Pulls rows of the next batch in advance, and refreshes the network even if only parts
        of the model are called.
        """
        for item in self.status.follow(loader, self.engine.prefetch(loader)):
            if self.model.training:  # a prediction takes the servers' network at its first call
                self.communicator.freshen()
            yield item

    def report(self, metrics: dict[str, float]) -> None:
        self.status.report(metrics)

    def workers(self) -> Workers:
        """All workers, for exchanges among themselves."""
        self.communicator.rest()
        return Workers(
            self._connect(),
            self.info.worker_index,
            self.info.num_workers,
            self.strategy.sync_timeout,
            self._passes,
            self.share_files,
        )

    def whole_tables(self, share: float | None, shared: bool = False) -> WholeTables:
        """From now on, train on whole copies of the tables instead of in the worker's mode."""
        if isinstance(self.communicator, WholeTables):
            raise FleetError("fleet.whole_tables() was called before: a worker has one set of them")
        if self._caches:
            found = ", ".join(map(repr, self._caches))
            raise FleetError(
                f"fleet.whole_tables(): table {found} has a cache (SparseEmbedding(cache=...)), and whole tables are "
                "copies of their own. Leave cache out."
            )
        tables = make_whole_tables(self._setup, self.client, self._connect, self.workers, share, shared)
        self._replace_communicator(tables)
        return tables

    def allow_threads(self) -> None:
        """Called before several threads train. In async mode this lifts the bound for the network, unless the user has
        set it: a server bounds the staleness of one set of values per worker."""
        if self._default_bound() is not None:
            tell("several threads train: max_staleness, the number of workers by default, does not hold from now on")
            unbounded = make_unbounded(self._setup, self.client, self._connect)
            unbounded.num_steps = self.communicator.num_steps
            self._replace_communicator(unbounded)

    def share_files(self) -> None:
        """Called when workers share a list of files. In async mode this lifts the bound for the network, unless the
        user has set it: faster workers take more files, and a worker that waits for the others' files pushes nothing.
        """
        if (bounded := self._default_bound()) is not None:
            bounded.lift()

    def _default_bound(self) -> Bounded | None:
        """The communicator, if it has a bound that the user has not set."""
        is_default = self.strategy.a_sync_configs.max_staleness == NUM_WORKERS
        return self.communicator if is_default and isinstance(self.communicator, Bounded) else None

    def _replace_communicator(self, communicator: Communicator) -> None:
        self.communicator.stop()
        self._use_caches(communicator)
        self.communicator = communicator
        self.engine.use(communicator)
        for optimizer in self._optimizers:
            optimizer.bind(self.engine, communicator)
        communicator.start()

    def _use_caches(self, communicator: Communicator) -> None:
        communicator.caches = list(self._caches.values())
        if self._caches:
            communicator.takes_threads = False  # a cache is filled for the batches of one thread

    def save(self, dirname: str, kind: Kind, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Save the model as it is on the servers, including this worker's gradients."""
        self.communicator.flush()
        storage = Storage(dirname)
        # A restarted worker does not know what it saved before.
        if not self.info.restart and storage.path not in self._saved_to:
            tell_of_replacing(storage, kind, {server["model"] for server in self.client.stats()})
        if self._hybrid is not None:
            self._hybrid.put_network()
        updates, are_others_at_work = self._last_saves.state() if self._membership is not None else ([], False)
        self.describer.write(storage)  # before the save is complete: who follows saves has it then
        saved = save_model(self.client, self._plan, dirname, self.strategy.sync_timeout, kind, extra)
        self._saved_to.add(storage.path)
        if self._membership is not None:
            made = LastSave(dirname, kind, extra, updates)
            is_open = are_others_at_work or self.communicator.keeps_rest
            self._last_saves.note(self.communicator.num_steps, storage.path, made, is_open)
        return saved

    def complete_saves(self) -> list[str]:
        """Before worker 0 stops: wait for the other workers if it has saved since its last step, and save again what
        they have changed since. Returns where.

        Not if the job was asked to end: then the others are not going to make their last step.
        """
        saves = self._last_saves.after(self.communicator.num_steps)
        if self._membership is None or not saves or stop_request.was_seen():
            return []
        self.communicator.rest()
        self.communicator.hand_over()
        if self._hybrid is not None and self._hybrid.meets_at_end:
            self._hybrid.meet_at_end()
        else:
            self._membership.finish(self.client)
            self._last_saves.wait_for_others()
        outdated = [save for save in saves if self._last_saves.is_outdated(save)]
        for save in outdated:
            number = self.save(save.dirname, save.kind, save.extra).number
            print(f"fleet: {save.dirname} is saved again (save {number}): others trained after the save", flush=True)
        return [save.dirname for save in outdated]

    def is_asked_to_stop(self) -> bool:
        return self.info.worker_index == 0 and stop_request.has_come()

    def shrink(self, table: str | None, policy: Shrink) -> dict[str, int]:
        self.communicator.flush()
        dropped = self.client.shrink(table or "", policy, self.strategy.sync_timeout)
        for cache in self._caches.values():  # of rows that may be gone
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

    def abandon(self) -> None:
        """Release everything without notifying the servers: connections, heartbeats, hooks on model and optimizer.

        The sending threads have ended by then or were never started: `stop` ends them even if it fails.
        """
        self._ends.close()

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

    def _connect(self, worker: int | None = None) -> Client:
        """`worker`: another worker, in whose name the client acts."""
        return self._links.connect(worker)

    def _join(self) -> Membership | None:
        if self.info.is_local:
            return None
        info, strategy = self.info, self.strategy
        check_releases(self.client)
        claims = claims_of(self._plan.specs, strategy, info.num_servers, self._exchange)
        joins = info if strategy.mode in FREE_MODES else replace(info, max_restart=0)  # else no worker waits for it
        made = Membership(self._connect(), joins, strategy.sync_timeout, self._waiting_share, claims)
        self._ends.callback(made.close)
        # Ranks start together, and their launcher counts the restarts.
        if strategy.mode != "hybrid" or info.on_worker_loss != LOSS_END:
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
        if self._exchange == SERVERS and self.info.num_workers > 1:
            from torchfleet.api.hybrid.round_worker import RoundWorker

            own = self._connect()
            return RoundWorker(self.model, optimizer, self.strategy, self.info, self.client, own)
        from torchfleet.api.hybrid.hybrid_worker import HybridWorker  # imports torch.distributed, so only on demand

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

    def _compute_blocks(self) -> None:
        """Decide where the blocks under fleet.device_guard("gpu") are computed: by heter workers, or here."""
        if self.info.heter_endpoints:
            self._blocks = remote_blocks(self.model, self.info, self.strategy)
            self._ends.callback(self._blocks.close, is_told=False)
        else:
            place_blocks(self.model, self.info, self.strategy)

    def _model_state(self) -> ModelState:
        put_network = None if self._hybrid is None else self._hybrid.put_network
        meet = partial(self._wait_for_all, "load_state_dict()", "load_state_dict")
        servers = Servers(self.client, self._connect, lambda: self.communicator, meet, put_network)
        is_first, is_restarted = self.info.worker_index == 0, bool(self.info.restart)
        return ModelState(self.model, self._plan, self.engine, is_first, is_restarted, servers)

    def _whole_step_made(self) -> None:
        """Called after a step of all optimizers."""
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
