"""A worker that has started: it is connected and has joined, its tables exist, and its model is bound. worker_role.py
has what it does then.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from torchfleet.api.hybrid.exchange_choice import chosen_exchange, network_device
from torchfleet.api.hybrid.hybrid_optimizer import HybridOptimizer
from torchfleet.api.job.heter_role import heter_blocks, place_blocks, remote_blocks
from torchfleet.api.job.job_setup import JobSetup
from torchfleet.api.job.joining import catch_up, check_loss_rule, join, with_restarts
from torchfleet.api.job.model_hooks import LEFT, global_schedules, hook_model, trace_steps
from torchfleet.api.job.row_caches import make_caches
from torchfleet.api.job.server_links import ServerLinks
from torchfleet.api.job.training_mode import TrainingMode
from torchfleet.api.job.worker_saves import WorkerSaves
from torchfleet.api.job.worker_start import (
    check_loaded,
    make_tables,
    patience_with,
    wait_for_backups,
    wait_for_servers,
    with_known_restart,
)
from torchfleet.api.job.worker_status import WorkerStatus
from torchfleet.api.serving.description import ModelDescriber, saved_features
from torchfleet.base.monitor.notices import tell
from torchfleet.base.monitor.stop_request import end_with_save, stop_request
from torchfleet.base.storage import Storage
from torchfleet.base.strategy.server_fields import SERVERS
from torchfleet.ps.kernels.team import TEAM
from torchfleet.ps.tables.rows.row_statistics import is_pushed
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.heter.remote_block import RemoteBlocks
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.membership import Membership
from torchfleet.ps.worker.model_state import ModelState, Servers
from torchfleet.ps.worker.modes.communicator import Communicator
from torchfleet.ps.worker.optimizer_state import OptimizerState
from torchfleet.ps.worker.peers import Workers
from torchfleet.ps.worker.sent_buffers import SentBuffers

if TYPE_CHECKING:
    from torchfleet.api.hybrid.hybrid_worker import HybridWorker


class StartedWorker:
    """The parts of a worker, created in the order of their dependencies; `abandon` ends them in reverse order."""

    def __init__(self, setup: JobSetup, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        self._setup, self.info, self._plan = setup, setup.info, setup.plan
        assert setup.strategy is not None
        assert setup.model is not None
        self.strategy, self.model, self._optimizers = setup.strategy, setup.model, setup.optimizers
        self._ends = contextlib.ExitStack()  # cleanup for `abandon`, in reverse order
        patience = patience_with(self.strategy, self.info)
        self._links = ServerLinks(self.info, self._plan, patience, dirname, var_names)
        self._ends.callback(self._links.close)
        self.first_step = 0  # the worker's first step: in sync mode above 0 after a restart
        self._passes: Counter[str] = Counter()  # over shared lists of files, by name
        self._blocks: RemoteBlocks | None = None  # what heter workers compute
        self._known_status: WorkerStatus | None = None  # None until training can begin
        self.client = self._connect()
        self._ends.callback(self.client.close)
        try:
            self._join_job(dirname, var_names)
            self._prepare_training()
            if self.info.worker_index == 0:
                self._load_features(dirname)
                if dirname is not None and var_names is None:
                    self.describer.load(Storage(dirname))
        except BaseException:
            self.abandon()
            raise

    def _join_job(self, dirname: str | None, var_names: Sequence[str] | None) -> None:
        """Wait for the servers, join the job, and wait until its tables have their first values."""
        setup = self._setup
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
        setup.info = self.info
        if dirname is not None:
            check_loaded(self.client, dirname)
        make_tables(self.client, self._plan, self.info, self.strategy, [one.given for one in self._optimizers])
        wait_for_backups(self.client, self.info)

    def _prepare_training(self) -> None:
        """Create what computes and sends, and bind it to the model and its optimizers."""
        setup = self._setup
        for group in self._plan.fixed if self.info.num_workers > 1 else ():
            group.watch()
        self._mode = TrainingMode(setup, self.client, self._connect, lambda: self.num_workers)
        self._ends.callback(self.communicator.release)
        self._hybrid = self._hybrid_worker()
        if self._hybrid is not None:
            self._ends.callback(self._hybrid.close, True)
        pushed = {name: group.spec.entry for name, group in self._plan.sparse.items() if is_pushed(group.spec)}
        modules = {name: group.modules for name, group in self._plan.sparse.items()}
        self._caches = make_caches(self._plan, self.client, self._connect, self._ends)
        self._mode.use_caches(self._caches)
        self.engine = self._mode.engine = Engine(self.communicator, modules, pushed, self._caches)
        self._buffers = self._sent_buffers()
        self._saves = WorkerSaves(
            setup, self.client, self._membership, self._hybrid, lambda: self._mode.communicator, self._buffers
        )
        if self.info.worker_index == 0:
            self.engine.on_first_call = self.describer.note_call
        self.status = self._known_status = WorkerStatus(
            self.info, self.strategy.mode, lambda: self._mode.communicator, self.engine
        )
        self._ends.callback(self.status.close)
        self._schedules = global_schedules(self.info, self.strategy.mode, self._optimizers[0])
        self._bind()
        self._compute_blocks()
        self._ends.callback(self._bind_states().close, LEFT)
        self._tracing = trace_steps(self.info, self.strategy.mode, self.model, self._optimizers)
        self._ends.callback(self._tracing.close)
        self.communicator.start()
        self.communicator.take_states()
        self.status.write(now=True)

    @property
    def communicator(self) -> Communicator:
        """The current communicator."""
        return self._mode.communicator

    @property
    def describer(self) -> ModelDescriber:
        """Writes the description of the model beside its saves."""
        return self._saves.describer

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
        """Call before workers wait for each other at a server: in hybrid mode another worker may still wait for this
        one in a step.
        """
        if self._hybrid is not None:
            self._hybrid.meet(what)

    def workers(self) -> Workers:
        """All workers, for exchanges among themselves."""
        self.communicator.rest()
        return Workers(
            self._connect(),
            self.info.worker_index,
            self.info.num_workers,
            self.strategy.sync_timeout,
            self._passes,
            self._mode.share_files,
        )

    def abandon(self) -> None:
        """Release everything without notifying the servers: connections, heartbeats, hooks on model and optimizer.

        The sending threads have ended by then or were never started: `stop` ends them even if it fails.
        """
        self._ends.close()

    def _connect(self, worker: int | None = None) -> Client:
        """Create a client. `worker`: the worker that the client acts for; by default this one."""
        return self._links.connect(worker)

    def _join(self) -> Membership | None:
        if self.info.is_local:
            return None
        made = join(self._setup, self.client, self._connect(), self._exchange, self._waiting_share)
        self._ends.callback(made.close)
        self.info = with_restarts(self.info, self.strategy, made)
        if self.strategy.mode == "sync":
            self.first_step = catch_up(self.client, made.told, len(self._optimizers), self.strategy.sync_timeout)
        return made

    def _waiting_share(self) -> float | None:
        return None if self._known_status is None else self._known_status.waiting_share()

    def _hybrid_worker(self) -> HybridWorker | None:
        optimizer = self._optimizers[0]
        if not isinstance(optimizer, HybridOptimizer):
            return None
        if self.info.num_workers > 1 and self.info.worker_index == 0 and not self._plan.dense:
            tell(
                "hybrid mode: the model has no trained parameters beside rows, so no step waits for other workers. "
                "Call fleet.barrier_worker() before an evaluation or a save, which then has the steps of all workers."
            )
        if self._exchange == SERVERS and self.info.num_workers > 1:
            from torchfleet.api.hybrid.round_worker import RoundWorker

            own = self._connect()
            return RoundWorker(self.model, optimizer, self.strategy, self.info, self.client, own)
        from torchfleet.api.hybrid.hybrid_worker import HybridWorker  # imports torch.distributed, so only on demand

        with self.workers() as others:
            return HybridWorker(self.model, optimizer, self.strategy, self.info, self.client, others.gather)

    def _bind(self) -> None:
        hook_model(self.model, self._plan, self.engine, lambda: self._mode.communicator, self._ends)
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

    def _sent_buffers(self) -> SentBuffers | None:
        """None if they are sent otherwise, or if no other process can follow the servers."""
        if self.info.worker_index or self.info.is_local or self._hybrid is not None or not self._plan.fixed:
            return None
        made = SentBuffers(self._plan.fixed, self._connect)
        self._ends.callback(made.close)
        return made

    def _bind_states(self) -> ModelState:
        """Let state_dict and load_state_dict of the optimizers and of the model reach the servers."""
        put_network = None if self._hybrid is None else self._hybrid.put_network
        meet = partial(self._wait_for_all, "load_state_dict()", "load_state_dict")
        servers = Servers(self.client, self._connect, lambda: self._mode.communicator, meet, put_network)
        is_first, is_restarted = self.info.worker_index == 0, bool(self.info.restart)
        for optimizer in self._optimizers:
            network = optimizer.kept_network()
            counts_in_int = isinstance(optimizer.user, torch.optim.SparseAdam)
            optimizer.use_state(
                OptimizerState(optimizer.plan, self.engine, is_first, is_restarted, servers, network, counts_in_int)
            )
        return ModelState(self.model, self._plan, self.engine, is_first, is_restarted, servers)

    def _load_features(self, dirname: str | None) -> None:
        """Load the features of the save that the job goes on from, which servers may have loaded alone."""
        loaded = self.client.stats()[0]["model"] if dirname is None else os.fspath(dirname)
        if loaded:
            self.describer.features.load(saved_features(Storage(loaded)), loaded)

    def is_asked_to_stop(self) -> bool:
        return self.info.worker_index == 0 and stop_request.has_come()

    def _whole_step_made(self) -> None:
        """Called after a step of all optimizers."""
        self._step_made()
        if self._buffers is not None:
            self._buffers.step_made()
        self._tracing.step_made()
        folder = self.info.save_on_stop
        if folder and self.is_asked_to_stop():
            end_with_save(lambda: self._saves.save(folder, "full"), folder)

    def _step_made(self) -> None:
        self.status.step_made()
        if self._hybrid is not None:
            self._hybrid.step_made()
        if self._schedules is not None:
            self._schedules.step_made()
