"""A process of a job as a server: its tables are made and loaded, then served."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torchfleet.job.job_setup import JobSetup
from torchfleet.monitor.status import StatusFile
from torchfleet.net.addresses import listen
from torchfleet.net.keys import KeyFolder
from torchfleet.server.server import Server
from torchfleet.server.table_loading import load_model
from torchfleet.server.warm import warm_up


class ServerRole:
    """The server's life: tables made and loaded when it is constructed, served by `run` until all workers have left."""

    def __init__(self, setup: JobSetup, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        self._info = setup.info
        self._server = Server(num_workers=setup.info.num_workers)
        for spec in setup.plan.specs:
            self._server.state.add_table(spec.for_shard(setup.info.server_index, setup.info.num_servers))
        if dirname is not None:
            load_model(self._server.state, dirname, var_names, setup.plan.layouts)
        self._ended = False

    def run(self) -> None:
        """Serve until all workers have stopped, `end` is called, or SIGTERM comes to the main thread."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
        warm_up()
        keys = KeyFolder(self._info.key_dir) if self._info.key_dir else None
        listener = listen(f"tcp://{self._info.server_endpoints[self._info.server_index]}", keys, self._info.insecure)
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
