"""A job with parameter servers, as fleet.py's functions act on it: set up, then a worker or a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torchfleet.errors import FleetError
from torchfleet.job.job_setup import JobSetup
from torchfleet.job.printing import configuration, summary, tables
from torchfleet.job.server_role import ServerRole
from torchfleet.job.worker_role import WorkerRole
from torchfleet.role import SERVER, RoleInfo
from torchfleet.strategy.distributed_strategy import DistributedStrategy

NO_WORKER = "call fleet.init_worker() first (on a worker)"
NO_SERVER = "call fleet.init_server() before fleet.run_server()"


class ParameterServerJob(JobSetup):
    """One process's part in a job with servers. Implements torchfleet.job.protocol.Job."""

    def __init__(self, info: RoleInfo, strategy: DistributedStrategy | None) -> None:
        super().__init__(info, strategy)
        self._worker: WorkerRole | None = None
        self._server: ServerRole | None = None

    @property
    def worker(self) -> WorkerRole:
        """This process as a worker; an error before init_worker, and on servers."""
        if self._worker is None:
            raise FleetError(NO_WORKER)
        return self._worker

    def first_worker(self, what: str) -> WorkerRole:
        """This process as worker 0; an error that names fleet.`what` on any other."""
        worker = self.worker
        if self.info.worker_index != 0:
            raise FleetError(
                f"fleet.{what} is called on worker 0 only, and this is worker {self.info.worker_index}: ask "
                "is_first_worker()"
            )
        return worker

    @property
    def mode(self) -> str:
        return self.worker.strategy.mode

    @property
    def data_shard(self) -> tuple[int, int]:
        return self.info.worker_index, self.info.num_workers

    def init_server(self, dirname: str | None = None, var_names: list[str] | None = None) -> None:
        if var_names is not None and dirname is None:
            raise FleetError("init_server(var_names=...) names what to load from a saved model: give dirname, too")
        if self.info.role != SERVER:
            raise FleetError(
                "fleet.init_server is for servers, and this process is a worker: ask fleet.is_server() first"
            )
        self._server = ServerRole(self, dirname, var_names)

    def run_server(self) -> None:
        if self._server is None:
            raise FleetError(NO_SERVER)
        self._server.run()

    def init_worker(self, dirname: str | None = None, var_names: list[str] | None = None) -> None:
        if self.info.role == SERVER:
            raise FleetError(
                "fleet.init_worker is for workers, and this process is a server: ask fleet.is_server() first"
            )
        if self._worker is not None:
            raise FleetError("fleet.init_worker was called before")
        if var_names is not None and dirname is None:
            raise FleetError("init_worker(var_names=...) names what to load from a saved model: give dirname, too")
        _ = self.plan  # model and optimizer must be there
        assert self.strategy is not None
        print(configuration(self.info, self.strategy), flush=True)
        self._worker = WorkerRole(self, dirname, var_names)
        if self.info.debug:
            print(self.describe(), flush=True)

    def begin_prediction(self, model: torch.nn.Module, dirname: str | None, var_names: list[str] | None) -> None:
        """After training, or as a job of its own, whose servers serve here until the workers have stopped."""
        if self.model is not None and model is not self.model:
            raise FleetError("DistributedInfer: give it the model of fleet.distributed_model; a job has one model")
        if self._worker is not None:
            if dirname is not None:
                raise FleetError(
                    "the tables of this job are in use already: leave dirname out, or predict in a job of its own"
                )
            self._worker.communicator.refresh()
            return
        if dirname is None:
            raise FleetError("init_distributed_infer_env(dirname=...): say which saved model to predict with")
        if self.model is None:
            self.distribute_model(model)
        self.distribute_for_prediction()
        if self.info.role == SERVER:
            self.init_server(dirname, var_names)
            self.run_server()
        else:
            self.init_worker(dirname, var_names)

    def barrier(self) -> None:
        self.worker.barrier()

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        return self.worker.engine.prefetch(loader)

    def gather(self, name: str, data: bytes) -> list[bytes]:
        """What every worker brought, in their order; in one local process also before init_worker."""
        if self._worker is None:
            if not self.info.is_local:
                raise FleetError("the workers meet after fleet.init_worker(), and servers do not meet at all")
            return [data]
        with self._worker.workers() as all_workers:
            return all_workers.gather(name, data)

    def report(self, metrics: dict[str, float]) -> None:
        self.worker.report(metrics)

    def describe(self) -> str:
        """The tables, which parameter goes to which, and what each server holds once there is a worker to ask."""
        return tables(self.plan, self.info, self._worker.client.stats() if self._worker is not None else [])

    def save(self, dirname: str, extra: Mapping[str, Any] | None) -> int:
        return self.first_worker("save_persistables").save(dirname, "full", extra).number

    def load(self, dirname: str) -> dict[str, Any]:
        raise FleetError("fleet.load is for collective training; servers load when they start: init_server(dirname)")

    def stop(self) -> None:
        """Send what is queued and tell the servers. The first worker prints how old its fleet's rows were."""
        final = self.worker.stop()
        if self.info.worker_index == 0:
            print(summary(final), flush=True)
