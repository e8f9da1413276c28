"""Creates the communicator for the mode of a strategy."""

from __future__ import annotations

from collections.abc import Callable

from torchfleet.api.job.job_setup import JobSetup
from torchfleet.base.errors import FleetError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.strategy.server_fields import NUM_WORKERS
from torchfleet.ps.worker.batch.sample_count import SampleCount
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.modes.asynchronous import Async
from torchfleet.ps.worker.modes.bounded import Bounded
from torchfleet.ps.worker.modes.communicator import Communicator, Gathering, HalfAsync, Sync
from torchfleet.ps.worker.modes.geo import Geo
from torchfleet.ps.worker.modes.hybrid import Hybrid
from torchfleet.ps.worker.modes.table_copy import STARTED_AGAIN, TableCopy, alone, common_copy, on_this_machine
from torchfleet.ps.worker.modes.whole_tables import WholeTables, table_sizes
from torchfleet.ps.worker.peers import Workers


def make_communicator(
    setup: JobSetup, client: Client, connect: Callable[[], Client], num_present: Callable[[], int]
) -> Communicator:
    """The communicator of the strategy's mode. `connect`: creates another client, for another thread. `num_present`:
    the number of workers present now.
    """
    strategy, plan, num_workers = _strategy(setup), setup.plan, setup.info.num_workers
    configs, mode = strategy.a_sync_configs, strategy.mode
    # For waits on other workers: servers end them at sync_timeout and name the missing; silent servers time out.
    patience = strategy.sync_timeout + strategy.rpc_timeout
    if mode == "sync":
        return Sync(client, plan, connect, patience, num_workers, _samples(setup))
    if mode == "half_async":
        return HalfAsync(client, plan, connect, _gathering(setup))
    if mode == "async" and (bound := _bound(setup)):
        return Bounded(client, plan, connect, bound, num_workers, patience)
    if mode == "async":
        return make_unbounded(setup, client, connect)
    if mode == "hybrid":
        return Hybrid(client, plan, connect, configs)
    (optimizer,) = setup.optimizers
    states, is_first = optimizer.user.state, setup.info.worker_index == 0
    return Geo(client, plan, connect, configs.k_steps, num_present, optimizer.step_locally, states, is_first)


def make_unbounded(setup: JobSetup, client: Client, connect: Callable[[], Client]) -> Async:
    """The communicator of async mode without max_staleness."""
    return Async(client, setup.plan, connect, _strategy(setup).a_sync_configs, _gathering(setup))


def make_whole_tables(
    setup: JobSetup,
    client: Client,
    connect: Callable[[int], Client],
    workers: Callable[[], Workers],
    share: float | None,
    shared: bool,
) -> WholeTables:
    """The tables that fleet.whole_tables returns. `connect`: creates another client that acts for the given worker."""
    if share is not None and not (isinstance(share, (int, float)) and 0 < share <= 1):
        raise FleetError(
            f"fleet.whole_tables(share={share!r}): the part of a difference that is sent, above 0, at most 1"
        )
    strategy, info = _strategy(setup), setup.info
    if not info.is_local and strategy.mode != "geo":
        raise StrategyError(
            f"fleet.whole_tables() is geo training, and the strategy says {strategy.mode}: use "
            "DistributedStrategy(a_sync=True, a_sync_configs={'k_steps': N}), or train through the model"
        )
    if info.is_elastic:
        raise FleetError(
            "fleet.whole_tables() shares differences out among a fixed number of workers, and those of this job come "
            "and go (FLEET_MIN_WORKERS): train through the model"
        )
    k_steps = strategy.a_sync_configs.k_steps if not info.is_local else 0
    copy = _table_copy(setup, client.num_servers, workers, shared)
    first = copy.sharing.workers[0]  # the servers see all workers of a copy as one
    return WholeTables(client, setup.plan, lambda: connect(first), copy, k_steps, share, strategy.sync_timeout)


def _table_copy(setup: JobSetup, num_servers: int, workers: Callable[[], Workers], shared: bool) -> TableCopy:
    info, sizes = setup.info, table_sizes(setup.plan)
    if not shared or info.num_workers == 1:
        return TableCopy(sizes, num_servers, alone(info.worker_index, info.num_workers))
    if info.restart:
        raise FleetError(STARTED_AGAIN)
    with workers() as others:
        return common_copy(sizes, num_servers, on_this_machine(others.gather, info.worker_index), others.gather)


def _bound(setup: JobSetup) -> int:
    """The limit for the staleness of the network; 0: no limit. Servers count the pushes of one optimizer only."""
    configs = _strategy(setup).a_sync_configs
    has_one = len(setup.optimizers) == 1 or configs.max_staleness != NUM_WORKERS
    return configs.bound(setup.info.num_workers) if has_one else 0


def _gathering(setup: JobSetup) -> Gathering | None:
    configs = _strategy(setup).a_sync_configs
    return Gathering(configs.gather, configs.gather_max_age, _samples(setup)) if configs.gather > 1 else None


def _samples(setup: JobSetup) -> SampleCount | None:
    """A counter of samples, for means weighted by samples; None without such means. A single worker's gradient in sync
    mode is the mean itself.
    """
    assert setup.model is not None
    strategy, info = _strategy(setup), setup.info
    has_mean = info.num_workers > 1 or strategy.a_sync_configs.gather > 1
    is_weighted = strategy.sync_mean == "samples" and has_mean
    return SampleCount(setup.model, info.worker_index, len(setup.optimizers)) if is_weighted else None


def _strategy(setup: JobSetup) -> DistributedStrategy:
    assert setup.strategy is not None
    return setup.strategy
