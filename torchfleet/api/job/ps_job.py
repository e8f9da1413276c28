"""A job with parameter servers, behind fleet's functions: a setup, then a worker or a server."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torchfleet.api.job.heter_role import HeterRole
from torchfleet.api.job.job_setup import JobSetup
from torchfleet.api.job.not_begun import NO_SERVER, NO_WORKER
from torchfleet.api.job.printing import configuration, summary, tables
from torchfleet.api.job.server_role import ServerRole, meeting_name
from torchfleet.api.job.worker_role import WorkerRole
from torchfleet.api.job.worker_start import check_loaded
from torchfleet.base.adoption import options_of, set_options
from torchfleet.base.errors import FleetError
from torchfleet.base.role.role_info import HETER_WORKER, SERVER, RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.kernels.compiling import tell_of_compilation
from torchfleet.ps.worker.model_saving import Kind


class ParameterServerJob(JobSetup):
    """One process's part in a job with servers. Implements torchfleet.api.job.protocol.Job."""

    def __init__(self, info: RoleInfo, strategy: DistributedStrategy | None) -> None:
        super().__init__(info, strategy)
        self._worker: WorkerRole | None = None
        self._server: ServerRole | None = None
        self._to_load: tuple[str, list[str] | None] | None = None  # arguments of init_server in a job of one process

    @property
    def worker(self) -> WorkerRole:
        """This process as a worker. Raises an error before init_worker, and on servers."""
        if self._worker is None:
            raise FleetError(NO_WORKER)
        return self._worker

    def first_worker(self, what: str) -> WorkerRole:
        """This process as worker 0. On other processes, raises an error that names fleet.`what`."""
        worker = self.worker
        if self.info.worker_index != 0:
            raise FleetError(
                f"fleet.{what} is called on worker 0 only, and this is worker {self.info.worker_index}: ask "
                "is_first_worker()"
            )
        return worker

    def save_tables(self, dirname: str, kind: Kind, extra: Mapping[str, Any] | None) -> int:
        return self.first_worker("save_persistables").save(dirname, kind, extra).number

    @property
    def mode(self) -> str:
        return self.worker.strategy.mode

    @property
    def num_workers(self) -> int:
        return self.info.num_workers if self._worker is None else self._worker.num_workers

    @property
    def data_shard(self) -> tuple[int, int]:
        if self.info.is_elastic:
            raise FleetError(
                "the number of workers changes in this job (FLEET_MIN_WORKERS), so there are no fixed shares of the "
                "samples. Use dataset.set_filelist(files, dynamic=True)"
            )
        return self.info.worker_index, self.info.num_workers

    def init_server(self, dirname: str | None = None, var_names: list[str] | None = None) -> None:
        if var_names is not None and dirname is None:
            raise FleetError("init_server(var_names=...) names what to load from a saved model: give dirname, too")
        if self.info.is_local:
            self._init_local_server(dirname, var_names)
            return
        if self.info.role != SERVER:
            raise FleetError(
                f"fleet.init_server is for servers, and this process is a {self.info.role}: ask fleet.is_server() first"
            )
        server = ServerRole(self)
        server.listen()  # before loading, which may take long, so that workers see this server
        if dirname is not None:
            server.load(dirname, var_names)
        self._server = server

    def _init_local_server(self, dirname: str | None, var_names: list[str] | None) -> None:
        """In a job of one process, init_worker starts the servers and loads the model."""
        _ = self.plan  # requires model and optimizer
        if self._worker is not None:
            raise FleetError("fleet.init_server comes before fleet.init_worker, in one process too")
        if dirname is not None:
            self._to_load = dirname, var_names

    def run_server(self) -> None:
        if self.info.is_local:
            raise FleetError(
                "fleet.run_server: in one process the servers are within the worker. Go on with fleet.init_worker(), "
                "and ask fleet.is_server() before this."
            )
        if self._server is None:
            raise FleetError(NO_SERVER)
        self._server.run()

    def run_heter_worker(self) -> None:
        if self.model is None:
            raise FleetError("call fleet.distributed_model before this: a heter worker computes blocks of the model")
        HeterRole(self.model, self.info, self.strategy or DistributedStrategy()).run()

    def init_worker(self, dirname: str | None = None, var_names: list[str] | None = None) -> None:
        if self.info.role == SERVER:
            raise FleetError(
                "fleet.init_worker is for workers, and this process is a server: ask fleet.is_server() first"
            )
        if self._worker is not None:
            raise FleetError("fleet.init_worker was called before")
        if var_names is not None and dirname is None:
            raise FleetError("init_worker(var_names=...) names what to load from a saved model: give dirname, too")
        _ = self.plan  # requires model and optimizer
        assert self.strategy is not None
        if self._to_load is not None:
            if dirname is not None and (dirname, var_names) != self._to_load:
                raise FleetError(
                    f"init_worker was told to load {dirname!r} {var_names or ''}, and init_server {self._to_load[0]!r} "
                    f"{self._to_load[1] or ''}: give both the same"
                )
            dirname, var_names = self._to_load
        print(configuration(self.info, self.strategy), flush=True)
        tell_of_compilation()
        self._worker = WorkerRole(self, dirname, var_names)
        if self.info.debug:
            print(self.describe(), flush=True)

    def begin_prediction(self, model: torch.nn.Module, dirname: str | None, var_names: list[str] | None) -> None:
        """Begin prediction after training, or as a separate job, whose servers serve here until all workers have
        stopped.
        """
        if self.model is not None and model is not self.model:
            raise FleetError("DistributedInfer: give it the model of fleet.distributed_model; a job has one model")
        if self._worker is not None:
            if dirname is not None:
                raise FleetError(
                    "the tables of this job are in use already: leave dirname out, or predict in a job of its own"
                )
            self._worker.communicator.flush()
            return
        if dirname is None:
            raise FleetError("init_distributed_infer_env(dirname=...): say which saved model to predict with")
        if self.model is None:
            self.distribute_saved_model(model, dirname)
        self.distribute_for_prediction()
        if self.info.role == SERVER:
            self.init_server(dirname, var_names)
            self.run_server()
        elif self.info.role == HETER_WORKER:
            self.run_heter_worker()
            raise SystemExit(0)
        else:
            self.init_worker(dirname, var_names)

    @property
    def is_under_way(self) -> bool:
        return self._worker is not None or (self._server is not None and self._server.is_listening)

    def reset(self) -> None:
        if self.strategy is not None:
            self.strategy.unlock()
        if self._server is not None:
            self._server.close()
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            worker.stop(alone=True)
        except Exception as error:  # servers are gone, or a thread had failed: the job ends in any case
            worker.abandon()
            print(f"fleet.reset: the worker could not leave its servers in order: {error}", file=sys.stderr, flush=True)

    def barrier(self) -> None:
        self.worker.barrier()

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        return self.worker.prefetch(loader)

    def plan_epochs(self, num: int, start: int) -> None:
        self.worker.status.epochs.plan(num, start)

    def gather(self, name: str, data: bytes, comm_world: str = "worker") -> list[bytes]:
        """Gather the data of all processes in `comm_world`, in order. A single local process may call it before
        init_worker.
        """
        if self.info.is_local and (self._worker is None or comm_world != "worker"):
            return [data]
        if comm_world not in ("all", self.info.role):
            raise FleetError(
                f"comm_world='{comm_world}' is for {comm_world}s, and this process is a {self.info.role}: ask "
                "fleet.is_server() first, or use comm_world='all' on every process"
            )
        if self.info.role == SERVER:
            if self._server is None:
                raise FleetError("servers meet between fleet.init_server() and fleet.run_server(): call it there")
            return self._server.gather(name, data, comm_world)
        if self._worker is None:
            raise FleetError("call fleet.init_worker() before this: workers can exchange data only after it")
        self._worker.meet(f"a gather of all workers ('{name}')")
        num_servers = self.info.num_servers if comm_world == "all" else 0
        with self._worker.workers() as all_workers:
            return all_workers.gather(meeting_name(name, comm_world, self.info), data, num_servers)

    def report(self, metrics: dict[str, float]) -> None:
        self.worker.report(metrics)

    def describe(self) -> str:
        """The tables, the parameters of each and, once there is a worker, the contents of each server."""
        return tables(self.plan, self.info, self._worker.client.stats() if self._worker is not None else [])

    def save(self, dirname: str, extra: Mapping[str, Any] | None, asynchronous: bool = False) -> int:
        if asynchronous:
            raise FleetError(
                "fleet.save(asynchronous=True) is for collective training: servers write beside training in any case"
            )
        return self.first_worker("save_persistables").save(dirname, "full", extra).number

    def load(self, dirname: str) -> dict[str, Any]:
        raise FleetError("fleet.load is for collective training; servers load when they start: init_server(dirname)")

    def check_whole_state(self) -> None:
        for optimizer in self.optimizers:
            kept = optimizer.kept_network()
            if kept is None:
                continue
            for group in optimizer.plan.dense:
                has_state = any(kept.states.get(parameter) for parameter in group.parameters)
                if has_state and (not group.spec.num_states or not all(map(kept.owns, group.parameters))):
                    raise FleetError(
                        f"fleet.save_state: the state of {type(optimizer.user).__name__} for '{group.names[0]}' is not "
                        "saved by servers: they keep that of the optimizers whose rule they know, of workers that have "
                        "all of it. Use one of those in hybrid mode, without 'sharding', or fleet.save."
                    )

    def begin_from(self, dirname: str) -> None:
        check_loaded(self.worker.client, dirname)

    def optimizer_options(self) -> list[list[dict[str, Any]]]:
        return [options_of(optimizer) for optimizer in self.optimizers]

    def set_optimizer_options(self, options: list[list[dict[str, Any]]]) -> None:
        for optimizer, own in zip(self.optimizers, options, strict=True):
            set_options(optimizer, own)

    def is_asked_to_stop(self) -> bool:
        """Only worker 0 is asked, since it saves. The others must continue until it has saved: in sync mode its step
        waits for them.
        """
        return self.worker.is_asked_to_stop()

    @property
    def num_steps(self) -> int:
        return self.worker.communicator.num_steps

    @property
    def changed_settings(self) -> dict[str, Any]:
        return {} if self.strategy is None else self.strategy.differences()

    def complete_saves(self) -> list[str]:
        return self.worker.complete_saves()

    def stop(self) -> dict[str, Any]:
        """Send queued gradients and leave the servers. Worker 0 prints a summary with the staleness on all servers."""
        final = self.worker.stop()
        if self.info.worker_index == 0:
            print(summary(final), flush=True)
        for path, number in self.worker.replaced_saves.items():
            print(
                f"{path}: save {number} of an earlier job was replaced, from which this job did not start", flush=True
            )
        return final
