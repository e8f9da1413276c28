"""Which way the network takes in hybrid mode: what is set, else what the job needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import each_of

from torchfleet.api.hybrid.exchange_choice import chosen_exchange
from torchfleet.base.errors import FleetError
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HERE = RoleInfo(num_workers=2, server_endpoints=("127.0.0.1:1",))
AWAY = replace(HERE, server_endpoints=("192.0.2.1:1",))
KEYS = {"key_dir": "keys"}


def strategy(configs: dict[str, Any] | None = None, **fields: Any) -> DistributedStrategy:
    return DistributedStrategy(a_sync=True, a_sync_configs={"hybrid": True, **(configs or {})}, **fields)


@each_of(
    ("info", "device", "settings", "chosen"),
    [
        (HERE, CPU, strategy(), "ranks"),
        (replace(HERE, **KEYS), CPU, strategy(), "servers"),
        (replace(AWAY, **KEYS), CPU, strategy(), "servers"),
        (replace(AWAY, **KEYS, insecure=True), CPU, strategy(), "ranks"),
        (replace(AWAY, **KEYS), GPU, strategy(), "ranks"),
        (replace(AWAY, **KEYS), CPU, strategy(sharding=True), "ranks"),
        (replace(HERE, on_worker_loss="go_on"), CPU, strategy(), "servers"),
        (replace(HERE, min_workers=1, on_worker_loss="go_on"), CPU, strategy(), "servers"),
        (HERE, CPU, strategy({"balance": True}), "servers"),
        (HERE, CPU, strategy({"quorum": 2}), "servers"),
        (HERE, CPU, strategy(sync_mean="workers"), "servers"),
        (HERE, GPU, strategy({"exchange": "servers"}), "servers"),
        (replace(AWAY, **KEYS), CPU, strategy({"exchange": "ranks"}), "ranks"),
        (HERE, CPU, strategy({"exchange": "servers"}, amp=True, amp_configs={"dtype": "bfloat16"}), "servers"),
    ],
)
def test_a_setting_wins_and_else_the_job_decides(
    info: RoleInfo, device: torch.device, settings: DistributedStrategy, chosen: str
) -> None:
    assert chosen_exchange(settings, info, device) == chosen


@pytest.mark.parametrize(
    ("info", "settings", "named"),
    [
        (HERE, strategy({"exchange": "servers"}, dgc=True), "dgc"),
        (HERE, strategy({"exchange": "servers"}, amp=True), "amp"),
        (replace(HERE, on_worker_loss="go_on"), strategy({"exchange": "ranks"}), "on_worker_loss=go_on"),
        (replace(HERE, on_worker_loss="wait"), strategy(localsgd=True), "localsgd"),
        (HERE, strategy({"exchange": "ranks", "balance": True}), "balance"),
        (HERE, strategy({"exchange": "ranks", "quorum": 2}), "quorum"),
    ],
)
def test_what_one_way_does_not_have_is_refused(info: RoleInfo, settings: DistributedStrategy, named: str) -> None:
    with pytest.raises(FleetError, match=named):
        chosen_exchange(settings, info, CPU)
