"""One process's part in a job, as server or as worker: what fleet.py's functions act on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from torchfleet.checkpoint.manifest import Manifest
from torchfleet.errors import FleetError, ModelError, ServerUnreachable, StrategyError
from torchfleet.monitor.status import StatusFile
from torchfleet.net.addresses import listen
from torchfleet.net.keys import KeyFolder
from torchfleet.net.transport import InProcess
from torchfleet.net.wire import Role
from torchfleet.role import RoleInfo
from torchfleet.server.server import Server
from torchfleet.server.table_loading import load_model
from torchfleet.server.warm import warm_up
from torchfleet.storage import Storage
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.tables.rows.row_statistics import is_counted, is_pushed
from torchfleet.tables.settings.clock import MAX_TIME
from torchfleet.tables.settings.policy import AdmissionEntry, Shrink
from torchfleet.worker.client.client import Client
from torchfleet.worker.client.connection import Patience
from torchfleet.worker.distributed_optimizer import DistributedOptimizer
from torchfleet.worker.lookup.conversion import convert
from torchfleet.worker.lookup.engine import Engine
from torchfleet.worker.lookup.plan import Plan, make_plan
from torchfleet.worker.model_saving import Kind, save_model
from torchfleet.worker.modes.asynchronous import Async
from torchfleet.worker.modes.communicator import Communicator, HalfAsync, Sync
from torchfleet.worker.modes.geo import Geo
from torchfleet.worker.modes.whole_tables import Replica
from torchfleet.worker.peers import Workers

START_SECONDS = 300.0  # servers import torch and may compile kernels before they answer
_CHUNK = 1 << 16


class Job:
    """Model, optimizer and strategy of a process, and the tables they lead to."""

    def __init__(self, info: RoleInfo, strategy: DistributedStrategy | None) -> None:
        self.info = info
        self.strategy = strategy
        self.model: torch.nn.Module | None = None
        self.optimizer: DistributedOptimizer | None = None

    def use(self, strategy: DistributedStrategy | None, user: str) -> None:
        """The strategy may be given to init or to distributed_optimizer, but not twice with differences."""
        if strategy is not None and self.strategy is not None and strategy != self.strategy:
            raise StrategyError(f"{user} got another strategy than was given before: give one, to fleet.init or here")
        self.strategy = strategy or self.strategy

    def distribute_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.model is not None:
            raise ModelError("fleet.distributed_model was called before: a job has one model")
        self.model = convert(model)
        return self.model

    def distribute_for_prediction(self) -> None:
        """Tables without optimizer state; nothing will be trained."""
        assert self.model is not None
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.strategy = DistributedStrategy(a_sync=True, a_sync_configs={"half_async": True})
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        plan = make_plan(self.model, optimizer, self.info.num_servers)
        for group in plan.sparse.values():  # nothing is admitted, and nothing may be dropped while nobody trains
            group.spec = msgspec.structs.replace(group.spec, entry=AdmissionEntry(), shrink=Shrink())
        self.optimizer = DistributedOptimizer(optimizer, plan)

    def distribute_optimizer(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
        if self.model is None:
            raise ModelError("call fleet.distributed_model(model) before fleet.distributed_optimizer")
        if self.optimizer is not None:
            raise ModelError("fleet.distributed_optimizer was called before: a job has one optimizer")
        self.strategy = self.strategy or DistributedStrategy()
        self.strategy.freeze("fleet.distributed_optimizer")
        plan = make_plan(self.model, optimizer, self.info.num_servers)
        _check_policies(plan, self.strategy.mode)
        if self.strategy.mode == "geo" and not isinstance(optimizer, torch.optim.SGD):
            raise StrategyError(
                f"geo training (k_steps={self.strategy.a_sync_configs['k_steps']}) sums differences and works with SGD "
                f"only, found {type(optimizer).__name__}. Use torch.optim.SGD, or k_steps=0 for async training."
            )
        self.optimizer = DistributedOptimizer(optimizer, plan)
        return self.optimizer

    @property
    def plan(self) -> Plan:
        if self.optimizer is None:
            raise FleetError("call fleet.distributed_model and fleet.distributed_optimizer before this")
        return self.optimizer.plan


class ServerJob:
    """The server's life: tables made and loaded by `init`, served by `run` until all workers have left."""

    def __init__(self, job: Job, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        self._job = job
        self._server = Server(num_workers=job.info.num_workers)
        for spec in job.plan.specs:
            self._server.state.add_table(spec.for_shard(job.info.server_index, job.info.num_servers))
        if dirname is not None:
            load_model(self._server.state, dirname, var_names, job.plan.layouts)
        self._ended = False

    def run(self) -> None:
        warm_up()
        info = self._job.info
        keys = KeyFolder(info.key_dir) if info.key_dir else None
        listener = listen(f"tcp://{info.server_endpoints[info.server_index]}", keys, info.insecure)
        status = StatusFile(info.status_file, self._status)

        def is_over() -> bool:
            status.write()
            return self._ended or self._server.is_stopping

        try:
            listener.serve(self._server, is_over)
        finally:
            status.write(now=True)
            listener.close()

    def end(self) -> None:
        """From a signal handler: finish the request at hand and return from `run`."""
        self._ended = True

    def _status(self) -> dict[str, Any]:
        state = self._server.state
        rows = {table.spec.name: table.stats()["rows"] for table in state.tables.values()}
        return {"role": "server", "requests": state.num_requests, "errors": state.num_errors, "rows": rows}


class WorkerJob:
    """The worker's life: connected, tables ready, everybody's first values equal; then steps; then leave."""

    def __init__(self, job: Job, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        self._job, self.info = job, job.info
        assert job.strategy is not None
        self.strategy = job.strategy
        self._local = self._local_server(dirname, var_names) if self.info.is_local else None
        self._keys = KeyFolder(self.info.key_dir) if self.info.key_dir else None
        self.client = self._connect()
        self._started = time.monotonic()
        self._reported: dict[str, float] = {}
        self._left = False
        self._passes: Counter[str] = Counter()  # over shared lists of files, by name
        self._wait_for_servers()
        if dirname is not None:
            self._check_loaded(dirname)
        self._make_tables()
        self.communicator: Communicator = self._communicator()
        pushed = {name: group.spec.entry for name, group in job.plan.sparse.items() if is_pushed(group.spec)}
        modules = {name: group.modules for name, group in job.plan.sparse.items()}
        self.engine = Engine(self.communicator, modules, pushed)
        self._status = StatusFile(self.info.status_file, self._status_now)
        self._bind()
        self.communicator.start()
        self._status.write(now=True)

    def barrier(self) -> None:
        # One name for all of them: a worker that was started again cannot know how many there have been.
        self.client.barrier("workers", self.info.num_workers, self.strategy.sync_timeout)

    def report(self, metrics: dict[str, float]) -> None:
        self._reported.update(metrics)
        self._status.write()

    def workers(self) -> Workers:
        """All workers, for things they do among themselves."""
        return Workers(
            self._connect(), self.info.worker_index, self.info.num_workers, self.strategy.sync_timeout, self._passes
        )

    def replica(self, share: float | None) -> Replica:
        """From now on this worker trains on whole copies of the tables, in the place of what its mode does."""
        if share is not None and not 0 < share <= 1:
            raise FleetError(f"fleet.replica(share={share}): the part of a difference that is sent, above 0, at most 1")
        if isinstance(self.communicator, Replica):
            raise FleetError("fleet.replica() was called before: a worker has one")
        if not self.info.is_local and self.strategy.mode != "geo":
            raise StrategyError(
                f"fleet.replica() is geo training, and the strategy says {self.strategy.mode}: use "
                "DistributedStrategy(a_sync=True, a_sync_configs={'k_steps': N}), or train through the model"
            )
        k_steps = self.strategy.a_sync_configs["k_steps"] if not self.info.is_local else 0
        share = share or 1.0 / self.info.num_workers
        replica = Replica(self.client, self._job.plan, self._connect, k_steps, share)
        self.communicator.stop()
        self.communicator = replica
        assert self._job.optimizer is not None
        self.engine.use(replica)
        self._job.optimizer.bind(self.engine, replica)
        replica.start()
        return replica

    def save(self, dirname: str, kind: Kind, extra: Mapping[str, Any] | None = None) -> Manifest:
        """Save the model as it is with the servers, this worker's gradients included."""
        self.communicator.flush()
        return save_model(self.client, self._job.plan, dirname, self.strategy.sync_timeout, kind, extra)

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

    def stop(self) -> dict[str, Any]:
        """Everything under way reaches the servers, then they are told. Returns the last statistics."""
        self.communicator.stop()
        final = self.stats()
        self._left = True
        self._status.write(now=True)
        self.client.leave()
        self.client.close()
        return final

    def stats(self) -> dict[str, Any]:
        worker = {
            **self.communicator.stats(),
            "samples": self.engine.num_samples,
            "lookups": self.engine.num_lookups,
            "unforeseen_lookups": self.engine.foresight.num_unforeseen,
        }
        return {"mode": self.strategy.mode, "worker": worker, "servers": self.client.stats()}

    def _connect(self) -> Client:
        patience = Patience(self.strategy.rpc_timeout, self.strategy.rpc_retry_times)
        role = Role.FIRST_WORKER if self.info.worker_index == 0 else Role.WORKER
        options: dict[str, Any] = {"worker": self.info.worker_index, "role": role, "patience": patience}
        if self._local is not None:
            client = Client([self._local.connect()], names=["the local server"], **options)
        else:
            client = Client.connect([f"tcp://{place}" for place in self.info.server_endpoints], self._keys, **options)
        for spec in self._job.plan.specs:
            client.attach(spec)
        return client

    def _wait_for_servers(self) -> None:
        """Servers may still be starting; one that is not there after START_SECONDS is named."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.client.ping()
                return
            except ServerUnreachable:
                if time.monotonic() >= deadline:
                    raise

    def _local_server(self, dirname: str | None, var_names: Sequence[str] | None) -> InProcess:
        server = Server(num_workers=1)
        if dirname is not None:
            for spec in self._job.plan.specs:
                server.state.add_table(spec)
            load_model(server.state, dirname, var_names, self._job.plan.layouts)
        return InProcess(server)

    def _check_loaded(self, dirname: str) -> None:
        """Servers load when they start; a worker that counts on it must not find them empty."""
        wanted = Storage(dirname).path
        for number, server in enumerate(self.client.stats()):
            if server["model"] != wanted:
                raise FleetError(
                    f"init_worker('{dirname}'): server {number} has loaded {server['model'] or 'no model'}. Give "
                    f"fleet.init_server('{dirname}') the same folder."
                )

    def _make_tables(self) -> None:
        if self.info.worker_index == 0 and not self.info.restart:
            for spec in self._job.plan.specs:
                self.client.create_table(spec)
            tables = [server["tables"] for server in self.client.stats()]
            for name, group in self._job.plan.sparse.items():
                first = group.modules[0].first_values
                if first is None or any(server[name]["loaded"] for server in tables):
                    continue
                for start in range(0, len(first), _CHUNK):
                    rows = first[start : start + _CHUNK]
                    self.client.assign(name, range(start, start + len(rows)), rows)
            for dense in (*self._job.plan.dense, *self._job.plan.fixed):
                values = dense.values()
                loaded = [part for server in tables for part in server[dense.spec.name]["loaded"]]
                if loaded:
                    saved = self.client.pull_dense(dense.spec.name).result()
                    for start, stop in loaded:
                        values[start:stop] = saved[start:stop]
                self.client.set_dense(dense.spec.name, values)
        if self.info.num_workers > 1 and not self.info.restart:
            self._wait_for_first_values()
        for dense in (*self._job.plan.dense, *self._job.plan.fixed):
            dense.write(self.client.pull_dense(dense.spec.name).result())

    def _wait_for_first_values(self) -> None:
        if self.strategy.a_sync_configs["launch_barrier"] or not self._job.plan.dense:
            self.client.barrier("start", self.info.num_workers, max(START_SECONDS, self.strategy.sync_timeout))
            return
        names = {dense.spec.name for dense in self._job.plan.dense}
        deadline = time.monotonic() + START_SECONDS
        while not all(server["tables"][name]["is_set"] for server in self.client.stats() for name in names):
            if time.monotonic() > deadline:
                raise FleetError(f"after {START_SECONDS:g} s worker 0 has not set the first values; look at its log")
            time.sleep(0.05)

    def _communicator(self) -> Communicator:
        plan, configs, mode = self._job.plan, self.strategy.a_sync_configs, self.strategy.mode
        assert self._job.optimizer is not None
        if mode == "sync":
            return Sync(self.client, plan, self._connect, self.strategy.sync_timeout)
        if mode == "half_async":
            return HalfAsync(self.client, plan, self._connect)
        if mode == "async":
            return Async(self.client, plan, self._connect, configs)
        step = self._job.optimizer.step_locally
        return Geo(self.client, plan, self._connect, configs["k_steps"], self.info.num_workers, step)

    def _bind(self) -> None:
        assert self._job.model is not None
        assert self._job.optimizer is not None
        for group in self._job.plan.sparse.values():
            for module in group.modules:
                module.bind(self.engine)
        self._job.model.register_forward_pre_hook(
            lambda model, args, kwargs: self.engine.enter([args, kwargs]), with_kwargs=True
        )
        self._job.optimizer.bind(self.engine, self.communicator)
        self._job.optimizer.after_step = self._status.write

    def _status_now(self) -> dict[str, Any]:
        seconds = max(1e-9, time.monotonic() - self._started)
        stats = self.communicator.stats()
        return {
            "role": "worker",
            "mode": self.strategy.mode,
            "steps": stats["steps"],
            "steps_per_s": stats["steps"] / seconds,
            "samples_per_s": self.engine.num_samples / seconds,
            "queue": stats["queue"],
            "left": self._left,
            **self._reported,
        }


def _check_policies(plan: Plan, mode: str) -> None:
    """Admission and statistics happen where rows are looked up, and in geo training that is not the servers."""
    counted = [name for name, group in plan.sparse.items() if is_counted(group.spec)]
    if counted and mode == "geo":
        raise StrategyError(
            f"table '{counted[0]}' has an entry or shrink policy, and in geo training the servers do not see lookups. "
            "Use sync, half_async or async training, or leave the policies out."
        )
