"""A server process of a job, in the role that its environment describes: it gets its tables, then serves them."""

from __future__ import annotations

import functools
import secrets
import signal
import threading
import time
from collections.abc import Iterable, Sequence

from torchfleet.base.background import BackgroundThreads
from torchfleet.base.errors import FleetError
from torchfleet.base.role.process_settings import log_folder
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.ps.coordination.background_coordinator import BackgroundCoordinator
from torchfleet.ps.coordination.coordinators import make_coordinator
from torchfleet.ps.net import addresses
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import Way
from torchfleet.ps.net.refused import is_refused
from torchfleet.ps.net.transport import Channel, ServerSocket
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.server_run import Place, ServerRun
from torchfleet.ps.server.job.warm import COMPILING
from torchfleet.ps.server.log.durable_server import Durability
from torchfleet.ps.server.replicas.between import Identity
from torchfleet.ps.server.replicas.liveness import Liveness
from torchfleet.ps.server.replicas.replica import Replica
from torchfleet.ps.server.saves.table_loading import Layouts, load_model
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.server_log import rows_text, tables_text
from torchfleet.ps.tables.settings.spec import TableSpec

STARTING = "it is starting"
_PAUSE = 0.02  # seconds between two looks at whether a replica has a role


class JobServer:
    """The life of a server: create tables, bind the address, load a model, then `run` until all workers have left.

    The tables come from a script (api/job/server_role.py), or from worker 0 (bare_server.py).
    """

    def __init__(self, info: RoleInfo) -> None:
        self._info = info
        self._layouts: Layouts = {}
        self._way = Way(info.key_dir, info.socket_dir, info.address_book)
        self._server = Server(
            num_workers=info.num_workers,
            orphan_timeout=info.orphan_timeout,
            min_workers=info.min_workers,
            on_worker_loss=info.on_worker_loss,
        )
        self._server.state.meetings.place = info.server_index, info.num_servers
        place = Place(info.server_index, info.num_servers, info.replica, info.status_file)
        is_alone = len(info.replica_places) == 1  # a replica has its log itself
        keeps_log = info.durability == "log" and is_alone
        self._run = ServerRun(self._server, place, self._durability if keeps_log else None)
        self._say = self._run.say
        self._answering = BackgroundThreads([])
        self._is_ready = self._has_run = False

    def add_tables(self, specs: Iterable[TableSpec], layouts: Layouts) -> None:
        """Make the tables. `specs` describe this server's shards of them. `layouts`: as in load_model. Raises
        TableError."""
        for spec in specs:
            self._server.state.add_table(spec)
        self._layouts = layouts

    def listen(self) -> None:
        """Bind the address. Until `run`, workers that ask are told what this server is doing.

        A server that recovers from its log does not respond until it serves: workers know it and wait.
        """
        self._way.check()
        self._run.restore()
        place = self._info.replica_places[self._info.replica]
        listener = self._run.listen(self._way.endpoint(place), self._keys, self._info.insecure)
        self._run.expect_workers(self._info.start_timeout)
        least = f"{self._info.min_workers} to " if self._info.is_elastic else ""
        self._say(f"listening on {place} for {least}{self._info.num_workers} workers")
        self._tell_tables()
        if self._run.durable is not None:
            return
        self._server.loading = STARTING
        if len(self._info.replica_places) > 1:
            self._run.replica = self._make_replica()
        answer = functools.partial(listener.serve, self._run.handler, lambda: self._is_ready)
        self._answering = BackgroundThreads([answer], "the server's socket")
        self._answering.start()
        self._wait_for_role()

    @property
    def is_filled(self) -> bool:
        """Whether the tables come from a log, or from the primary that this server is the backup of."""
        replica = self._run.replica
        return self._run.durable is not None or (replica is not None and not replica.is_primary)

    def load(self, dirname: str, var_names: Sequence[str] | None = None) -> None:
        """Load a saved model, or only what `var_names` names of it. After an error, the address is released.

        A backup loads nothing, since its primary sends it the tables.
        """
        if self._run.replica is not None and not self._run.replica.is_primary:
            return
        if self._run.durable is not None:
            self._say(f"does not load {dirname}: all that came after it is in the log")
            return
        if self.is_listening:
            self._server.loading = f"it is loading {dirname}"
        started = time.monotonic()
        try:
            load_model(self._server.state, dirname, var_names, self._layouts)
        except BaseException:
            self.close()
            raise
        rows = rows_text(self._server.state.tables.values())
        self._say(f"loaded {dirname}: {rows} in {time.monotonic() - started:.1f} s")

    @property
    def is_listening(self) -> bool:
        return self._run.listener is not None

    def close(self) -> None:
        """Release the address."""
        self._end_answers()
        self._run.close()

    def run(self) -> None:
        """Serve until all workers have stopped, `end` is called, or the main thread receives SIGTERM.

        Raises FleetError if workers ended or fell silent without having stopped.
        """
        if threading.current_thread() is threading.main_thread():
            self._run.end_on(signal.SIGTERM)
        self._has_run = True
        self._begin_serving()
        self._run.open_status()
        if self._run.replica is not None:
            self._run.replica.begin()
        self._run.serve()

    def end(self) -> None:
        """Finish the current request and return from `run`. May be called from a signal handler."""
        self._run.end()

    def _begin_serving(self) -> ServerSocket:
        """Return the socket, which the calling thread owns from now on. Compiles kernels first."""
        if not self.is_listening:
            self.listen()
        if not self._is_ready:
            self._warm_up()
            if self._run.lacks_log:
                self._server.loading = "it is writing the first copy of its tables to its log"
            self._end_answers()
            self._answering.check()
        self._run.begin_log()
        assert self._run.listener is not None
        return self._run.listener

    def _warm_up(self) -> None:
        self._run.warm_up(self._tell_compilation)

    def _tell_tables(self) -> None:
        if self._server.state.tables:
            self._say(tables_text(self._server.state.tables.values()))

    def _tell_compilation(self) -> None:
        if self._run.durable is None:
            self._server.loading = f"it is {COMPILING}"

    def _make_replica(self) -> Replica:
        info = self._info
        assert info.coordinator is not None
        own = Identity(info.server_index, info.replica, info.restart, secrets.randbits(63) | 1)

        def connect(replica: int) -> Channel:
            return addresses.connect(self._way.endpoint(info.replica_places[replica]), self._keys, Role.SERVER)

        liveness = Liveness(lambda replica: is_refused(self._way.endpoint(info.replica_places[replica])), True)
        coordinator = BackgroundCoordinator(make_coordinator(info.coordinator), self._say)
        return Replica(
            self._server,
            own,
            coordinator,
            connect,
            liveness=liveness,
            waits_for_backup=info.waits_for_backups,
            durability=self._durability() if info.durability == "log" else None,
        )

    def _wait_for_role(self) -> None:
        """Wait until the coordinator has said whether this replica begins as primary, however long that takes."""
        replica = self._run.replica
        if replica is None:
            return
        while not replica.has_role and self._answering.is_alive():
            time.sleep(_PAUSE)
        self._answering.check()
        role = "primary" if replica.is_primary else "to be filled by the primary"
        self._say(f"replica {self._info.replica}, {role}")

    def _durability(self) -> Durability:
        info = self._info
        if info.log_store is None:
            raise FleetError("FLEET_DURABILITY=log needs a folder for the servers' logs: set FLEET_LOG_STORE")
        own, other = (log_folder(info.log_store, info.server_index, i) for i in (info.replica, 1 - info.replica))
        return Durability(own, info.fsync_ms, info.log_run, other)

    @property
    def _keys(self) -> KeyFolder | None:
        return KeyFolder(self._info.key_dir) if self._info.key_dir else None

    def _end_answers(self) -> None:
        """Stop the early replies. From now on the calling thread owns the socket and serves the tables."""
        self._is_ready = True
        self._answering.join()
        self._server.loading = ""
