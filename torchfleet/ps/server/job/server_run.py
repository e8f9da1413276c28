"""The run of one server in a process, from start to end, with its log, status, metrics and traces.

`python -m torchfleet.server` (main.py, or bare_server.py in a job) runs one, and so does a training script whose role
is server (api/job/server_role.py). Neither this file nor main.py imports torch.
"""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from torchfleet.base.errors import FleetError
from torchfleet.base.tracing.otlp import trace_every
from torchfleet.base.tracing.process_part import ProcessName
from torchfleet.base.tracing.profile_folder import folder_of
from torchfleet.ps.kernels.compiling import telling_compilation
from torchfleet.ps.kernels.jit import mark_of_all
from torchfleet.ps.net.addresses import listen
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.transport import ServerSocket
from torchfleet.ps.server.job.farewell import Farewell
from torchfleet.ps.server.job.warm import COMPILING, load_all, warm_up, warm_up_rest
from torchfleet.ps.server.log.durable_server import Durability, DurableServer, begin_log, go_on
from torchfleet.ps.server.log.newest_log import require_newest
from torchfleet.ps.server.look_ahead import LookAhead
from torchfleet.ps.server.replicas.replica import Replica
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.server_log import speaker
from torchfleet.ps.server.server_tracing import ServerTracing
from torchfleet.ps.server.state.server_status import ServerStatus


@dataclass(frozen=True)
class Place:
    """Which server of the job this is. `index` is None for a stand-alone server."""

    index: int | None = None
    num_servers: int = 1
    replica: int = 0
    status_file: str | None = None  # the path that the launcher reads the status from


class ServerRun:
    """Call `restore`, `listen`, `warm_up`, `begin_log`, `open_status`, then `serve`.

    With `durability` there is a log: `restore`, before the tables are filled, continues an existing one; `begin_log`,
    after it, begins a new one.
    """

    def __init__(self, server: Server, place: Place, durability: Callable[[], Durability] | None = None) -> None:
        """`durability`: returns the settings of the log. It is called when the log is opened, and raises FleetError if
        the settings are wrong."""
        self.server, self._place, self._durability = server, place, durability
        self.say = server.state.say = speaker(place.index)
        self.listener: ServerSocket | None = None
        self.durable: DurableServer | None = None
        self.replica: Replica | None = None
        self._status: ServerStatus | None = None
        self._compiler: subprocess.Popen[bytes] | None = None  # compiles the kernels that no table here uses yet
        self._trace_every = 0
        self._is_ended = self._has_compiled = False
        self._patience, self._began = math.inf, time.monotonic()

    def expect_workers(self, seconds: float) -> None:
        """Say on the server's log, once, if no worker has come within `seconds` from now."""
        self._patience, self._began = seconds, time.monotonic()

    def look_for_workers(self) -> None:
        """Called now and then, while the server waits for workers or serves them."""
        waited = time.monotonic() - self._began
        if waited < self._patience:
            return
        presence, members = self.server.state.meetings.presence, self.server.state.meetings.members
        if not presence.has_any and not members.left:
            index, num = self._place.index, self._place.num_servers
            self.say(
                f"no worker has come within {waited:.0f} s (FLEET_START_TIMEOUT). Expected "
                f"{self.server.state.num_workers} workers that know this process as server {index} of {num}: is its "
                "list of servers theirs (FLEET_SERVER_ENDPOINTS / PADDLE_PSERVERS_IP_PORT_LIST)? It waits on."
            )
        self._patience = math.inf

    @property
    def handler(self) -> Replica | DurableServer | Server:
        return self.replica or self.durable or self.server

    @property
    def lacks_log(self) -> bool:
        """Whether a log is asked for and neither `restore` nor `begin_log` has opened it."""
        return self._durability is not None and self.durable is None

    def restore(self) -> None:
        """Restore the server from its log. `durable` stays None if the log is empty."""
        if self._durability is not None:
            durability = self._durability()
            require_newest(durability)
            self.durable = go_on(self.server, durability, self.say)

    def begin_log(self) -> None:
        """Begin a log with a copy of the tables, if a log is asked for and none was restored."""
        if self._durability is not None and self.durable is None:
            self.durable = begin_log(self.server, self._durability())

    def listen(self, endpoint: str, keys: KeyFolder | None, insecure: bool) -> ServerSocket:
        self.listener = listen(endpoint, keys, insecure)
        return self.listener

    def warm_up(self, tell: Callable[[], None] = lambda: None) -> None:
        """Load the kernels of this server's tables. If they must be compiled, write that to the server's log and call
        `tell`. A process of low priority then compiles the others. A server without tables loads all kernels.
        """

        def say() -> None:
            self._has_compiled = True
            self.say(COMPILING)
            tell()

        specs = [table.spec for table in self.server.state.tables.values()]
        if (self._place.index or 0) % 2:  # on one machine, every second server begins with the others' last kernels
            specs.reverse()
        with telling_compilation(say):
            # With a backup or a log, the kernels for copies are loaded now, so that the server's loop never compiles.
            if specs:
                warm_up(specs, are_copied=self.replica is not None or self._durability is not None)
            else:
                load_all()
        if specs:
            self._compiler = warm_up_rest()

    @property
    def are_kernels_compiled(self) -> bool:
        """Whether all kernels are in the cache of this machine."""
        return mark_of_all().exists()

    def load_kernels(self) -> None:
        """Load all kernels if they are compiled: a server that waits for its tables has the time."""
        if self.are_kernels_compiled:
            load_all()

    def open_status(self) -> None:
        """Open the status file and the metrics port, and read the tracing settings. Raises FleetError."""
        place = self._place
        self._trace_every = trace_every()
        assert self.listener is not None
        self._status = ServerStatus(
            self.server.state,
            place.index or 0,
            place.status_file,
            place.replica,
            self.replica,
            self.listener.endpoint,
            self._has_compiled,
        )

    def serve(self) -> None:
        """Serve until all workers have left or `end` is called, then close everything.

        Raises FleetError if the server stopped because workers were lost, because another replica took over, or because
        its log can no longer be written.
        """
        assert self.listener is not None
        assert self._status is not None
        status, tracing, server, farewell = self._status, self._tracing(), self.server, Farewell()

        def is_over() -> bool:
            server.state.counters.load.look()
            status.write()
            tracing.look()
            self.look_for_workers()
            return self._is_ended or farewell.is_over(self.handler.is_stopping)

        self.listener.look_ahead = LookAhead(server.state)
        failure = ""
        try:
            self.listener.serve(self.handler, is_over)
        except FleetError as error:
            failure = str(error)
            raise
        finally:
            if self.replica is not None:
                self.replica.end(keeps_log=self._is_ended)
            status.write(now=True)
            status.close()
            tracing.close()
            self.close()
            self.say(f"stopped ({failure or self._why_over()}) after {server.state.counters.num_requests:,} requests")
        if self.replica is not None and self.replica.deposed:
            raise FleetError(self.replica.deposed)
        if server.desertion:
            raise FleetError(f"{server.desertion}. No worker is left; the server ends.")

    def end(self) -> None:
        """Make `serve` return after the current request. May be called from a signal handler."""
        self._is_ended = True

    def end_on(self, *signals: signal.Signals) -> None:
        """Call `end` when one of `signals` arrives. Main thread only."""

        def end(number: int, frame: FrameType | None) -> None:
            self.end()

        for found in signals:
            signal.signal(found, end)

    def close(self) -> None:
        """Release the address and close the log. The log is removed if all workers have left in an orderly way."""
        if self._compiler is not None:
            self._compiler.terminate()
            self._compiler.wait()
            self._compiler = None
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        if self.durable is not None:
            self.durable.end(keeps_log=self._is_ended)
            self.durable = None
        self.server.state.close_tables()

    def _why_over(self) -> str:
        if self._is_ended or not self.server.state.num_workers:
            return "told to end"
        if self.replica is not None and self.replica.deposed:
            return "another replica has taken over"
        return "workers are lost" if self.server.desertion else "all workers have left"

    def _tracing(self) -> ServerTracing:
        place, server = self._place, self.server
        num_workers = server.state.num_workers
        name = ProcessName("server", place.index or 0, num_workers, place.num_servers, server.incarnation)
        return ServerTracing(name, server.traced, folder_of(place.status_file), self._trace_every)
