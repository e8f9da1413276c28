"""A server process that runs the job's script: its tables follow from the script's model, and servers may meet."""

from __future__ import annotations

from torchfleet.api.job.job_setup import JobSetup
from torchfleet.api.job.worker_start import patience_with, wait_for_servers
from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.job_server import JobServer
from torchfleet.ps.worker.client.client import Client


class ServerRole(JobServer):
    """A JobServer with the tables of the script's model."""

    def __init__(self, setup: JobSetup) -> None:
        super().__init__(setup.info)
        info = setup.info
        self.add_tables(
            [spec.for_shard(info.server_index, info.num_servers) for spec in setup.plan.specs], setup.plan.layouts
        )
        self._strategy = setup.strategy or DistributedStrategy()

    def gather(self, name: str, data: bytes, comm_world: str) -> list[bytes]:
        """Gather the data of all servers (comm_world "server"), or of all workers and then all servers ("all"), in
        order.

        Call it before `run`. The processes meet at server 0, which must serve for it, and workers begin when all
        servers serve. So each server serves while it waits, with a thread as its client. Requests between two meetings
        wait in the socket.
        """
        if self._run.replica is not None:
            raise FleetError("servers with replicas (--replicas 2) do not meet: let the workers do it")
        if self._has_run:
            raise FleetError("servers meet between fleet.init_server() and fleet.run_server(): call it there")
        found: list[bytes] = []
        meeting = BackgroundThreads([lambda: found.extend(self._meet(name, data, comm_world))], f"{name} of servers")
        listener = self._begin_serving()
        meeting.start()
        listener.serve(self._run.handler, lambda: not meeting.is_alive())
        meeting.check()
        return found

    def _meet(self, name: str, data: bytes, comm_world: str) -> list[bytes]:
        info, settings = self._info, self._strategy
        first = info.num_workers if comm_world == "server" else 0  # servers are numbered after the workers
        num = info.num_servers if comm_world == "server" else info.num_workers + info.num_servers
        patience = patience_with(settings, info)
        number = info.num_workers + info.server_index
        places = [self._way.endpoint(info.server_endpoints[0])]
        with Client.connect(places, self._keys, worker=number, role=Role.WORKER, patience=patience) as client:
            wait_for_servers(client, info.start_timeout)
            name = meeting_name(name, comm_world, info)
            brought = client.gather(name, 1, data, num, settings.sync_timeout, first)
        return [brought[member] for member in sorted(brought)]


def meeting_name(name: str, comm_world: str, info: RoleInfo) -> str:
    """The name under which `comm_world` meets. It appears in errors, where servers are numbered after the workers."""
    if comm_world == "worker":
        return name
    return f"{name}, comm_world={comm_world!r}, server 0 being number {info.num_workers}"
