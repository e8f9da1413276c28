"""Chooses how workers exchange the network's gradients in hybrid mode: through the servers, or among them as ranks."""

from __future__ import annotations

import torch

from torchfleet.base.errors import RoleError, StrategyError
from torchfleet.base.role.role_info import LOSS_END, RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.strategy.server_fields import AUTO, RANKS, SERVERS
from torchfleet.ps.net.keys import is_private
from torchfleet.ps.worker.lookup.plan import Plan

# Strategies that do not exchange one mean per step, or exchange it in another way.
_NEED_RANKS = (
    *("sharding", "dgc", "localsgd", "adaptive_localsgd", "sync_batch_norm"),
    *("fp16_allreduce", "use_hierarchical_allreduce"),
)


def network_device(plan: Plan) -> torch.device:
    """The device of the network; the CPU if it has no parameters."""
    return next((p.device for group in plan.dense for p in group.parameters), torch.device("cpu"))


def chosen_exchange(settings: DistributedStrategy, info: RoleInfo, device: torch.device) -> str:
    """SERVERS or RANKS. A setting always wins; without one, as docs/modes/hybrid.md says.

    Raises StrategyError or RoleError if the exchange does not support what the job asks for.
    """
    wanted, needing = settings.a_sync_configs.exchange, _needs_ranks(settings)
    reason = _needs_servers(settings, info)
    if wanted == SERVERS and needing:
        raise StrategyError(
            f"a_sync_configs['exchange']='servers' and {needing} cannot be used together: it needs the ranks of "
            "torch.distributed. Leave one of them out."
        )
    if wanted != AUTO:
        chosen = wanted
    elif needing or device.type != "cpu":
        chosen = RANKS
    else:
        chosen = SERVERS if reason or _is_guarded(info) else RANKS
    if chosen == RANKS and reason:
        why = f"the network is on {device.type}" if wanted == AUTO else "a_sync_configs['exchange']='ranks'"
        why = f"{needing} needs them" if needing else why
        raise RoleError(
            f"{reason} is for hybrid mode with a_sync_configs['exchange']='servers', and this job exchanges the "
            f"network among ranks ({why}). Leave it out, or exchange through the servers."
        )
    return chosen


def _needs_servers(settings: DistributedStrategy, info: RoleInfo) -> str:
    """The setting that an exchange among ranks does not support; "" if there is none."""
    if info.is_elastic:
        return f"FLEET_MIN_WORKERS={info.min_workers}"
    if info.on_worker_loss != LOSS_END:
        return f"on_worker_loss={info.on_worker_loss}"
    if settings.a_sync_configs.balance:
        return "a_sync_configs['balance']=True"
    if settings.a_sync_configs.quorum:
        return f"a_sync_configs['quorum']={settings.a_sync_configs.quorum}"
    return "" if settings.is_default("sync_mean") else f"sync_mean={settings.sync_mean!r}"


def _needs_ranks(settings: DistributedStrategy) -> str:
    """The strategy that an exchange through the servers does not support; "" if there is none."""
    for name in _NEED_RANKS:
        if getattr(settings, name):
            return f"{name}=True"
    if settings.nccl_comm_num > 1:
        return f"nccl_comm_num={settings.nccl_comm_num}"
    if settings.amp and settings.amp_configs.dtype == "float16":
        return "amp in float16 (whose workers skip a step together)"
    return ""


def _is_guarded(info: RoleInfo) -> bool:
    """Whether traffic must be encrypted and authenticated, which traffic among ranks is not."""
    is_one_machine = all(is_private(f"tcp://{place}") for place in info.server_places)
    return not info.insecure and (info.key_dir is not None or not is_one_machine)
