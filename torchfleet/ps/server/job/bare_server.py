"""A server of a job without the job's script: worker 0 says which tables it has. It imports no torch.

`python -m torchfleet.server --of_job`, with the environment of a server, runs one. fleetrun starts servers so where the
script does nothing on them but init_server and run_server (launch/server_branch.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchfleet.base.command_line import Parser
from torchfleet.base.errors import FleetError, RoleError
from torchfleet.base.role.process_settings import OF_JOB
from torchfleet.base.role.role_info import SERVER
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.ps.server.job.given_tables import NO_TABLES, GivenTables, ModelChoice, TablesInbox
from torchfleet.ps.server.job.job_server import STARTING, JobServer
from torchfleet.ps.server.saves.save_roots import roots_of

_PERIOD = 1.0  # seconds between two looks at whether the thread that answers still runs


class BareServer(JobServer):
    """A JobServer that asks worker 0 for its tables."""

    def begin(self, choice: ModelChoice) -> None:
        """Bind the address, wait for the tables and make them, and load the chosen model. A backup gets its tables
        from its primary, and a server that goes on from a log gets them from the log."""
        inbox = TablesInbox()
        self._server.take_tables = inbox.take
        self.listen()
        if self.is_filled:
            return
        self._run.load_kernels()
        given = self._wait_for_tables(inbox)
        chosen = choice.of(given)
        self.add_tables(given.tables, given.layouts)
        self._tell_tables()
        if chosen is not None:
            self.load(*chosen)

    def _warm_up(self) -> None:
        """Load the kernels of the tables, or all kernels. Does nothing for a backup without tables on its primary's
        machine, unless all kernels are compiled: the primary compiles what is needed before it sends the tables."""
        hosts = {place.rpartition(":")[0] for place in self._info.replica_places}
        if self._server.state.tables or len(hosts) > 1 or self._run.are_kernels_compiled:
            super()._warm_up()

    def _wait_for_tables(self, inbox: TablesInbox) -> GivenTables:
        """Wait however long it takes: the launcher ends this process if the job fails before."""
        self._server.loading = NO_TABLES
        while (given := inbox.wait(_PERIOD)) is None:
            self._answering.check()
            self._run.look_for_workers()
        self._server.loading = STARTING
        return given


def main(arguments: Sequence[str]) -> int:
    """Run the server that the environment describes until all workers have left. Returns the exit status."""
    parser = Parser(prog=f"python -m torchfleet.server {OF_JOB}", description=__doc__)
    parser.add_argument("--load", metavar="DIR", help="the saved model that init_server names in the script")
    parser.add_argument("--load_name", action="append", metavar="NAME", help="load this of it only (var_names)")
    parser.add_argument("--load_by_worker", action="store_true", help="load the model that worker 0 names")
    parser.add_argument("--load_store", action="append", default=[], metavar="URL", help="a store it may be in")
    options = parser.parse_args(list(arguments))
    stores = [*options.load_store, *(root for root in roots_of(None) if "://" in root)]
    try:
        _run(ModelChoice(options.load, options.load_name, options.load_by_worker, stores))
    except FleetError as error:
        print(f"torchfleet server: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _run(choice: ModelChoice) -> None:
    info = PaddleCloudRoleMaker().read()
    if info.role != SERVER:
        raise RoleError(f"{OF_JOB}: expected the environment of a server (FLEET_ROLE=SERVER), found that of a worker")
    server = BareServer(info)
    try:
        server.begin(choice)
    except FleetError:
        server.close()
        raise
    server.run()
