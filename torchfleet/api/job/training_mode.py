"""The communicator of a worker: at first for the strategy's mode; replaced if the loop trains in another way."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchfleet.api.job.job_setup import JobSetup
from torchfleet.api.job.mode_choice import make_communicator, make_unbounded, make_whole_tables
from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.notices import tell
from torchfleet.base.strategy.server_fields import NUM_WORKERS
from torchfleet.ps.worker.cache.row_cache import RowCache
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.lookup.engine import Engine
from torchfleet.ps.worker.modes.bounded import Bounded
from torchfleet.ps.worker.modes.communicator import Communicator
from torchfleet.ps.worker.modes.whole_tables import WholeTables
from torchfleet.ps.worker.peers import Workers


class TrainingMode:
    """Creates the worker's communicator, and replaces it when the loop trains in another way."""

    engine: Engine  # which looks rows up through the communicator

    def __init__(
        self,
        setup: JobSetup,
        client: Client,
        connect: Callable[[int | None], Client],
        num_present: Callable[[], int],
    ) -> None:
        """`connect`: creates another client, for another thread; it acts for another worker, if one is given.
        `num_present`: the number of workers present now.
        """
        self._setup, self._client, self._connect = setup, client, connect
        self._caches: Mapping[str, RowCache] = {}
        self._num_present = num_present
        self.communicator: Communicator = make_communicator(setup, client, self._connect_again, num_present)
        self._watch_parameters()

    def use_caches(self, caches: Mapping[str, RowCache]) -> None:
        """Train the rows of these tables in caches."""
        self._caches = caches
        self._give_caches(self.communicator)

    def whole_tables(self, workers: Callable[[], Workers], share: float | None, shared: bool) -> WholeTables:
        """From now on, train on whole copies of the tables. `workers`: for exchanges among all workers."""
        if isinstance(self.communicator, WholeTables):
            raise FleetError("fleet.whole_tables() was called before: a worker has one set of them")
        if self._caches:
            found = ", ".join(map(repr, self._caches))
            raise FleetError(
                f"fleet.whole_tables(): table {found} has a cache (SparseEmbedding(cache=...)), and whole tables are "
                "copies of their own. Leave cache out."
            )
        tables = make_whole_tables(self._setup, self._client, self._connect, workers, share, shared)
        self._replace(tables)
        return tables

    def allow_threads(self) -> None:
        """Called before several threads train. In async mode this lifts the bound for the network, unless the user has
        set it: a server bounds the staleness of one set of values per worker. With a cache, which is filled for one
        thread, several cannot train, and the bound stays."""
        if self._default_bound() is not None and not self._caches:
            tell("several threads train: max_staleness, the number of workers by default, does not hold from now on")
            unbounded = make_unbounded(self._setup, self._client, self._connect_again)
            self._replace(unbounded)

    def share_files(self) -> None:
        """Called when workers share a list of files. In async mode this lifts the bound for the network, unless the
        user has set it: faster workers take more files, and a worker that waits for the others' files pushes nothing.
        """
        if (bounded := self._default_bound()) is not None:
            bounded.lift()

    def _default_bound(self) -> Bounded | None:
        """The communicator, if it has a bound that the user has not set."""
        assert self._setup.strategy is not None
        is_default = self._setup.strategy.a_sync_configs.max_staleness == NUM_WORKERS
        return self.communicator if is_default and isinstance(self.communicator, Bounded) else None

    def _replace(self, communicator: Communicator) -> None:
        self.communicator.stop()
        communicator.begin_after(self.communicator.num_steps)
        self._give_caches(communicator)
        self.communicator = communicator
        self._watch_parameters()
        self.engine.use(communicator)
        for optimizer in self._setup.optimizers:
            optimizer.bind(self.engine, communicator)
        communicator.start()

    def _watch_parameters(self) -> None:
        self.communicator.num_workers = self._num_present
        self.communicator.watch_parameters()

    def _give_caches(self, communicator: Communicator) -> None:
        communicator.caches = list(self._caches.values())
        if self._caches:
            communicator.takes_threads = False  # a cache is filled for the batches of one thread

    def _connect_again(self) -> Client:
        return self._connect(None)
