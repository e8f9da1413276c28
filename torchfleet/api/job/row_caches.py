"""The caches of a worker: SparseEmbedding(cache=...), for which jobs they are exact, and their life."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.tables.rows.row_statistics import is_counted
from torchfleet.ps.tables.settings.row_format import FLOAT32
from torchfleet.ps.worker.cache.cache_thread import CacheThread
from torchfleet.ps.worker.cache.row_cache import RowCache
from torchfleet.ps.worker.cache.write_back import WriteBack
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.lookup.plan import Plan, SparseGroup

# Seconds after which a thread lets others run. Python's own 5 ms are longer than a step: the threads of a cache, which
# wait for a device or server in between, would come too late.
SWITCH_INTERVAL = 0.0002


def cached_groups(plan: Plan) -> dict[str, SparseGroup]:
    """The tables with a cache."""
    return {name: group for name, group in plan.sparse.items() if group.modules[0].cache}


def check_caches(plan: Plan, strategy: DistributedStrategy, info: RoleInfo) -> None:
    """Raise an error if the results with a cache would differ from those without it.

    A worker trains the rows of its cache itself. The servers would compute the same rows if no other worker changes
    them, and if an update consists of the table's rule only.
    """
    for name, group in cached_groups(plan).items():
        given, spec = f"SparseEmbedding(cache=...) of table '{name}'", group.spec
        if info.num_workers > 1 or info.is_elastic:
            found = "workers that come and go" if info.is_elastic else f"{info.num_workers} workers"
            raise StrategyError(
                f"{given}: found {found}, and the rows in a worker's cache do not see the updates of others. Leave "
                "cache out, or train with one worker; several GPUs share rows as fleet.nn.SparseEmbedding("
                "device='cuda') in a collective job."
            )
        if strategy.mode == "geo":
            raise StrategyError(f"{given}: in geo training a worker has a copy of its own already. Leave cache out.")
        if strategy.a_sync_configs.gather > 1:
            gather = strategy.a_sync_configs.gather
            raise StrategyError(
                f"{given}: with a_sync_configs['gather']={gather} the servers make one update of {gather} steps, and "
                "the cache one of every step. Leave one of them out."
            )
        if is_counted(spec):
            raise ModelError(
                f"{given}: its entry or shrink counts lookups on the servers, which do not see those in a cache. Leave "
                "cache out, or entry and shrink."
            )
        if spec.format != FLOAT32:
            raise ModelError(
                f"{given}: dtype='{spec.format.dtype}' rounds rows at every update on the servers, and a cache has "
                "float32. Leave one of them out."
            )


def make_caches(plan: Plan, client: Client, connect: Callable[[], Client], ends: ExitStack) -> dict[str, RowCache]:
    """The caches, on the devices of their embeddings. `ends`: closes their threads."""
    groups = cached_groups(plan)
    if not groups:
        return {}
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL))
    ends.callback(sys.setswitchinterval, before)
    steps = {name: client.pull_rows(name, []).result()[1] for name in groups}
    rows = {name: sum(server["tables"][name]["rows"] for server in client.stats()) for name in groups}
    write_back = WriteBack(connect)
    ends.callback(write_back.close)
    thread = CacheThread(connect)
    ends.callback(thread.close)
    made = {}
    for name, group in groups.items():
        size, device = group.modules[0].cache, group.modules[0].weight.device
        made[name] = RowCache(group.spec, size, device, steps[name], thread, write_back, rows[name] > 0)
    return made
