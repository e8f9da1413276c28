"""A heter worker process of a job, and how a worker reaches the heter workers."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from torchfleet.base.errors import FleetError, ModelError, StrategyError
from torchfleet.base.monitor.prometheus.metrics_port import open_metrics_port
from torchfleet.base.monitor.status import StatusFile
from torchfleet.base.own_device import device_of
from torchfleet.base.role.role_info import HETER_WORKER, WORKER, RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.net import addresses
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import Way
from torchfleet.ps.net.refused import is_refused
from torchfleet.ps.net.wire import Role
from torchfleet.ps.worker.heter.block_runner import BlockRunner
from torchfleet.ps.worker.heter.block_server import BlockServer
from torchfleet.ps.worker.heter.blocks import Block, blocks_of
from torchfleet.ps.worker.heter.heter_links import HeterLinks, Place
from torchfleet.ps.worker.heter.placed_block import place
from torchfleet.ps.worker.heter.remote_block import RemoteBlocks

_TOGETHER = "hybrid"  # the mode that heter workers do not support


def heter_blocks(model: torch.nn.Module, info: RoleInfo, strategy: DistributedStrategy) -> list[Block]:
    """The blocks that the heter workers of this job compute. Raises an error if the job cannot have heter workers."""
    num = len(info.heter_endpoints)
    if strategy.mode == _TOGETHER:
        raise StrategyError(
            f"{num} heter workers (--heter_worker_num) and {_TOGETHER} mode: in {_TOGETHER} mode the workers compute "
            "and average the network among themselves. Use sync, half_async, async or geo mode with heter workers, or "
            "leave them out."
        )
    blocks = blocks_of(model)
    if not blocks:
        raise ModelError(
            f"{num} heter workers (--heter_worker_num), and no block of the model for them: construct the network "
            "behind the embeddings under `with fleet.device_guard('gpu'):`, or leave the heter workers out"
        )
    return blocks


def place_blocks(model: torch.nn.Module, info: RoleInfo, strategy: DistributedStrategy) -> None:
    """In a job without heter workers, put the blocks on this worker's GPU, if it has one. In hybrid mode, the whole
    network is on one device, which the script chooses."""
    device = device_of(info)
    if info.role == WORKER and device.type != "cpu" and strategy.mode != _TOGETHER:
        place(blocks_of(model), device)


def remote_blocks(model: torch.nn.Module, info: RoleInfo, strategy: DistributedStrategy) -> RemoteBlocks:
    """Let the heter workers compute the blocks of the model, from now on until `close`."""
    blocks = heter_blocks(model, info, strategy)
    keys, way = KeyFolder(info.key_dir) if info.key_dir else None, Way(info.key_dir, info.socket_dir)
    role = Role.FIRST_WORKER if info.worker_index == 0 else Role.WORKER
    places = []
    for name in info.heter_endpoints:
        end = way.endpoint(name)
        connect = functools.partial(addresses.connect, end, keys, role)
        places.append(Place(name, connect, functools.partial(is_refused, end)))
    specs = [block.spec() for block in blocks]
    links = HeterLinks(places, specs, info.worker_index, role, info.start_timeout)
    return RemoteBlocks(blocks, links, info.worker_index, strategy.sync_timeout)


class HeterRole:
    """The life of a heter worker: bind its address, then compute blocks until all workers have left."""

    def __init__(self, model: torch.nn.Module, info: RoleInfo, strategy: DistributedStrategy) -> None:
        if info.role != HETER_WORKER:
            raise FleetError(
                f"fleet.run_heter_worker is for heter workers, and this process is a {info.role}: ask "
                "fleet.is_heter_worker() first"
            )
        self._info, self._blocks = info, heter_blocks(model, info, strategy)
        self._place = info.heter_endpoints[info.heter_index]

    def run(self) -> None:
        """Raises FleetError if the workers fell silent without having left."""
        info = self._info
        way = Way(info.key_dir, info.socket_dir)
        way.check()
        device = device_of(info)
        server = BlockServer(BlockRunner(self._blocks, device), info.num_workers, info.orphan_timeout)
        keys = KeyFolder(info.key_dir) if info.key_dir else None
        listener = addresses.listen(way.endpoint(self._place), keys, info.insecure)
        port = open_metrics_port(HETER_WORKER, info.heter_index, 0)
        status = StatusFile(info.status_file, functools.partial(_status, server, time.monotonic()), port)
        self._say(f"listening on {self._place} for {info.num_workers} workers; {_named(self._blocks)} on {device}")

        def is_over() -> bool:
            status.write()
            return server.is_stopping

        try:
            status.write(now=True)
            listener.serve(server, is_over)
        finally:
            status.write(now=True)
            status.close()
            listener.close()
            server.close()
            self._say(f"stopped after {server.num_computed:,} passes")
        if server.desertion:
            raise FleetError(f"{server.desertion}: the heter worker ends")

    def _say(self, text: str) -> None:
        print(f"torchfleet heter worker {self._info.heter_index}: {text}", file=sys.stderr, flush=True)


def _status(server: BlockServer, started: float) -> dict[str, Any]:
    return {
        "role": HETER_WORKER,
        "requests": server.counters.num_requests,
        "errors": server.counters.num_errors,
        "passes": server.num_computed,
        "sessions": server.num_sessions,
        "busy": min(1.0, server.seconds / max(1e-9, time.monotonic() - started)),
    }


def _named(blocks: Sequence[Block]) -> str:
    names = ", ".join(f"'{block.name}'" for block in blocks)
    return f"block {names}" if len(blocks) == 1 else f"blocks {names}"
