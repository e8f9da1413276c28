"""A process of a job as a server: its tables are made and loaded, then served."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torchfleet.background import BackgroundThreads
from torchfleet.errors import FleetError
from torchfleet.job.job_setup import JobSetup
from torchfleet.job.worker_start import wait_for_servers
from torchfleet.monitor.status import StatusFile
from torchfleet.net.addresses import listen
from torchfleet.net.keys import KeyFolder
from torchfleet.net.transport import ServerSocket
from torchfleet.net.wire import Role
from torchfleet.role import RoleInfo
from torchfleet.server.server import Server
from torchfleet.server.table_loading import load_model
from torchfleet.server.warm import warm_up
from torchfleet.strategy.distributed_strategy import DistributedStrategy
from torchfleet.worker.client.client import Client
from torchfleet.worker.client.connection import Patience


class ServerRole:
    """The server's life: tables made and loaded when it is constructed, served by `run` until all workers have left."""

    def __init__(self, setup: JobSetup, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        self._info = setup.info
        self._server = Server(num_workers=setup.info.num_workers)
        for spec in setup.plan.specs:
            self._server.state.add_table(spec.for_shard(setup.info.server_index, setup.info.num_servers))
        if dirname is not None:
            load_model(self._server.state, dirname, var_names, setup.plan.layouts)
        self._strategy = setup.strategy or DistributedStrategy()
        self._listener: ServerSocket | None = None
        self._ended = self._has_run = False

    def gather(self, name: str, data: bytes, comm_world: str) -> list[bytes]:
        """What all servers (comm_world "server"), or all workers and servers ("all"), brought, in this order.

        Before `run`. They meet at server 0, which must serve for it, and workers begin when all servers serve: so each
        serves while it waits, and a thread is its client.
        """
        if self._has_run:
            raise FleetError("servers meet between fleet.init_server() and fleet.run_server(): call it there")
        found: list[bytes] = []
        meeting = BackgroundThreads([lambda: found.extend(self._meet(name, data, comm_world))], f"{name} of servers")
        listener = self._open()
        meeting.start()
        listener.serve(self._server, lambda: not meeting.is_alive())
        meeting.check()
        return found

    def _meet(self, name: str, data: bytes, comm_world: str) -> list[bytes]:
        info, settings = self._info, self._strategy
        first = info.num_workers if comm_world == "server" else 0  # servers have the numbers behind the workers'
        num = info.num_servers if comm_world == "server" else info.num_workers + info.num_servers
        patience = Patience(settings.rpc_timeout, settings.rpc_retry_times)
        number = info.num_workers + info.server_index
        places = [f"tcp://{info.server_endpoints[0]}"]
        with Client.connect(places, self._keys, worker=number, role=Role.WORKER, patience=patience) as client:
            wait_for_servers(client)
            name = meeting_name(name, comm_world, info)
            brought = client.gather(name, 1, data, num, settings.sync_timeout, first)
        return [brought[one] for one in sorted(brought)]

    def _open(self) -> ServerSocket:
        """The socket, which stays open from the first meeting to the end of `run`: what comes between waits in it."""
        if self._listener is None:
            warm_up()
            place = f"tcp://{self._info.server_endpoints[self._info.server_index]}"
            self._listener = listen(place, self._keys, self._info.insecure)
        return self._listener

    @property
    def _keys(self) -> KeyFolder | None:
        return KeyFolder(self._info.key_dir) if self._info.key_dir else None

    def run(self) -> None:
        """Serve until all workers have stopped, `end` is called, or SIGTERM comes to the main thread."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
        self._has_run = True
        listener = self._open()
        status = StatusFile(self._info.status_file, self._status)

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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.end()

    def _status(self) -> dict[str, Any]:
        state = self._server.state
        rows = {table.spec.name: table.stats()["rows"] for table in state.tables.values()}
        return {"role": "server", "requests": state.num_requests, "errors": state.num_errors, "rows": rows}


def meeting_name(name: str, comm_world: str, info: RoleInfo) -> str:
    """The name under which `comm_world` meets. It stands in errors, which call servers by numbers behind workers'."""
    if comm_world == "worker":
        return name
    return f"{name}, comm_world={comm_world!r}, server 0 being number {info.num_workers}"
