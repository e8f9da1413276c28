"""Connections of a worker to all servers, over the network or to the server in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchfleet.base.role.role_info import RoleInfo
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import Way
from torchfleet.ps.net.transport import InProcess
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.saves.table_loading import load_model
from torchfleet.ps.server.server import Server
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience
from torchfleet.ps.worker.lookup.plan import Plan


class ServerLinks:
    """Creates clients that know the tables of `plan`. `local`: the server in a job of one process; else None.

    `dirname`: a saved model that the local server loads, completely or only what `var_names` names.
    """

    def __init__(
        self,
        info: RoleInfo,
        plan: Plan,
        patience: Patience,
        dirname: str | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        self._info, self._plan, self._patience = info, plan, patience
        self._server: Server | None = None
        self.local = self._local_server(dirname, var_names) if info.is_local else None
        self._keys = KeyFolder(info.key_dir) if info.key_dir else None
        self._way = Way(info.key_dir, info.socket_dir, info.address_book)
        self._way.check()

    def close(self) -> None:
        """The local server's tables are not used afterwards."""
        if self._server is not None:
            self._server.state.close_tables()

    def connect(self, worker: int | None = None) -> Client:
        """Create a client. `worker`: the worker that the client acts for; by default this one."""
        # The worker of a one-process job does not join. As a launcher, it may still send requests and leave.
        alone = Role.LAUNCHER if self.local is not None else Role.FIRST_WORKER
        role = alone if self._info.worker_index == 0 else Role.WORKER
        number = self._info.worker_index if worker is None else worker
        options: dict[str, Any] = {"worker": number, "role": role, "patience": self._patience}
        if self.local is not None:
            client = Client([self.local.connect()], names=["the local server"], **options)
        else:
            endpoints = [self._way.endpoint(place) for place in self._info.server_endpoints]
            client = Client.connect(endpoints, self._keys, **options)
        for spec in self._plan.specs:
            client.attach(spec)
        return client

    def _local_server(self, dirname: str | None, var_names: Sequence[str] | None) -> InProcess:
        server = self._server = Server(num_workers=1)
        if dirname is not None:
            for spec in self._plan.specs:
                server.state.add_table(spec)
            load_model(server.state, dirname, var_names, self._plan.layouts)
        return InProcess(server)
